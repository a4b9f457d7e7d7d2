"""Settings of the outer loop, and what all blocks of settings have in common."""
