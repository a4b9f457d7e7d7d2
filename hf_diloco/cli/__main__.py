"""`python -m hf_diloco.cli` is `hf-diloco`."""

from hf_diloco.cli.main import main

main()
