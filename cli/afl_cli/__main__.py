"""``python -m afl_cli``."""

import sys

from afl.terminal.entry import enter


def main() -> int:
    """The command; returns the exit code."""
    return enter("afl", "afl_cli.main")


if __name__ == "__main__":
    sys.exit(main())
