"""Which islands take part in a round, and whether the round happened."""
