"""The entry point of `hf-diloco` and of `python -m hf_diloco.cli`."""

import sys


def main() -> None:
    """Loads and runs the program. Ctrl-C ends it without a traceback, even while it is loading."""
    try:
        from hf_diloco.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
