"""1-bit LAMB and 1-bit Adam: optimizers whose ranks exchange one bit per value (arXiv 2104.06069, 2102.02888)."""
