"""``python -m afl_worker``."""

import sys

from afl.terminal.entry import enter


def main() -> int:
    """Run ``afl-worker`` with the process's arguments; returns the exit code."""
    return enter("afl-worker", "afl_worker.main", needs_linux=True)


if __name__ == "__main__":
    sys.exit(main())
