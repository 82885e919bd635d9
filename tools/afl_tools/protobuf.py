"""Whether the checked-in protobuf modules are what proto/ generates.

python -m afl_tools.protobuf --check
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "common" / "afl" / "v1"


def differing() -> list[str]:
    """The names of generated modules that are missing or differ from what proto/ gives now."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(  # our own script, with this interpreter
            ["/bin/sh", str(ROOT / "proto" / "generate.sh"), folder],
            check=True,
            env={**os.environ, "PYTHON": sys.executable},
        )
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / "afl" / "v1").iterdir()}
    present = {
        path.name: path.read_bytes()
        for path in GENERATED.iterdir()
        if path.is_file() and path.name != "__init__.py"
    }
    return sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m afl_tools.protobuf", description=__doc__)
    parser.add_argument("--check", action="store_true", required=True, help="fail if a module is not fresh")
    parser.parse_args()
    stale = differing()
    if stale:
        print(f"not what proto/ generates: {', '.join(stale)}; run `make proto`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
