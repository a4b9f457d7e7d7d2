"""The state of a run, read from the store where its islands meet. Imports no torch."""
