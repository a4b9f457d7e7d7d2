"""Everything that is to be seen on an accelerator, in steps of one command: `python -m benchmarks.accelerator`."""
