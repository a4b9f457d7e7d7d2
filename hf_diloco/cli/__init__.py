"""The command line: `hf-diloco launch | report | status | topology | config-schema`. Nothing here imports torch."""
