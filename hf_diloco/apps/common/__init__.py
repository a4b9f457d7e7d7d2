"""What every kind of run has: its file, its folder, its process environment, its Trainer's arguments."""
