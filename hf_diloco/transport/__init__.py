"""Moving values between islands: over connections, through an object store, in memory."""
