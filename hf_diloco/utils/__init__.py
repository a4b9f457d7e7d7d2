"""Helpers for all other folders: clocks, waiting, limits, text, files."""
