"""`hf-diloco`, which is also `python -m hf_diloco.cli`."""

import sys


def main() -> None:
    """Loads and runs the program. Ctrl-C ends it without a traceback, also while it is being loaded."""
    try:
        from hf_diloco.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
