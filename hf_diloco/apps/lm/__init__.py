"""Language models, causal and masked: pre-training and continued training from one run file."""
