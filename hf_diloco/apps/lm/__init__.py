"""Causal language models: pre-training and continued training from one run file."""
