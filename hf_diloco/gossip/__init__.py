"""Decentralised training: nodes average with neighbours on a graph after every step. Here: the graphs (`topology`)."""
