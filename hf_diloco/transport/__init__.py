"""Moving values between islands."""
