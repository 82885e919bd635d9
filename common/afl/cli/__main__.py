"""``python -m afl.cli``."""

import sys

from afl.cli.entry import enter


def main() -> int:
    """The command; returns the exit code."""
    return enter("afl", "afl.cli.main")


if __name__ == "__main__":
    sys.exit(main())
