"""A run in an object store, seen from outside: its islands, its rounds, what it keeps there. Imports no torch."""
