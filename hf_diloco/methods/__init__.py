"""What islands and nodes compute when they synchronise: one registry per kind of method, one file per method."""
