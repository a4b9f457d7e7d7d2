"""What would keep a run from working on this machine, each with its remedy."""
