"""``python -m afl_worker``."""

import sys

from afl_worker.main import main

if __name__ == "__main__":
    sys.exit(main())
