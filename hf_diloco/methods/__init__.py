"""What is computed when islands synchronise: one registry per kind of method, one file per method."""
