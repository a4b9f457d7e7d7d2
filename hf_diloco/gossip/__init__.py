"""Decentralised training: every node averages with a few neighbours after every step."""
