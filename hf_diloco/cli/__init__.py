"""The command line, `hf-diloco launch | report | status | topology | configs | ...`. Nothing here imports torch."""
