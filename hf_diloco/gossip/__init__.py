"""Decentralised training: every node averages with a few others, after every step. Graphs, methods, the exchange."""
