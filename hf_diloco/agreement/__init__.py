"""Who takes part in a round, and whether it happened.

Nothing is imported here: `ledger` and `rendezvous` need torch, what islands agree on in an object store does not.
"""
