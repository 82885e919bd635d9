"""``python -m afl_server``."""

import sys

from afl.terminal.entry import enter


def main() -> int:
    """The command; returns the exit code."""
    return enter("afl-server", "afl_server.main", needs_linux=True)


if __name__ == "__main__":
    sys.exit(main())
