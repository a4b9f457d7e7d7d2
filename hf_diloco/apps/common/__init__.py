"""Common parts of all kinds of runs: run file, run folder, process environment, the Trainer's arguments."""
