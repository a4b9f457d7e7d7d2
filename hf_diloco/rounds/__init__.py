"""Sessions and rounds: how an island meets the others and synchronises with them."""
