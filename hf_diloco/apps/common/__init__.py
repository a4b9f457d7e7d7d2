"""What all kinds of runs have in common: run file, run folder, process environment, the Trainer's arguments."""
