"""The outer loop around one training: the Trainer's callbacks, and `OuterLoop` for Accelerate."""
