"""Settings of the outer loop, and the common parts of all blocks of settings."""
