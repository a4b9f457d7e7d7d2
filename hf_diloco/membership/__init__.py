"""Who takes part in a round, and whether it happened."""
