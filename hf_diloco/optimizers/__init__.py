"""Inner optimizers that a run file names in its block `optimizer`."""
