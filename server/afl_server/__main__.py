"""``python -m afl_server``."""

import sys

from afl_server.main import main

if __name__ == "__main__":
    sys.exit(main())
