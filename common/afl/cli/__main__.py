"""``python -m afl.cli``."""

import sys

from afl.cli.main import main

sys.exit(main())
