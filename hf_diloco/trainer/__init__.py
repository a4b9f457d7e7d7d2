"""The outer loop around one training: what the Trainer's callbacks and the Accelerate loop do."""
