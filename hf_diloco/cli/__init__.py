"""The command line: `hf-diloco launch | report | status | config-schema`. Nothing here imports torch."""
