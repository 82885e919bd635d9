"""The folder of these tests is importable: they share one world."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
