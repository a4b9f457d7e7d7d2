"""A run where its islands meet, seen from outside: its islands, its rounds, what it keeps there. Imports no torch."""
