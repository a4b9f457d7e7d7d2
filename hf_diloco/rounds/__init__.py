"""How an island meets the others: one file a kind of session."""
