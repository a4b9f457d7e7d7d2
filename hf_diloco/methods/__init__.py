"""What is computed when islands synchronise: one registry a kind of method, one file a method."""
