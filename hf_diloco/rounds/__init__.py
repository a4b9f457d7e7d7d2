"""Sessions and rounds: how islands meet and synchronise."""
