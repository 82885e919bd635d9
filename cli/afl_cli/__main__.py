"""``python -m afl_cli``."""

import sys

from afl.terminal.entry import enter


def main() -> int:
    """Run ``afl`` with the process's arguments; returns the exit code."""
    return enter("afl", "afl_cli.main")


if __name__ == "__main__":
    sys.exit(main())
