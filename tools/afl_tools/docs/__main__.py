"""What is made from code in the documents, and the files in deploy that are made from others or from code.

python -m afl_tools.docs --check    fail if one is not what the code says
python -m afl_tools.docs --write    write them again
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from afl_tools.docs.generated import ROOT, fresh_files


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m afl_tools.docs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    stale = [
        (path, fresh)
        for path, fresh in fresh_files()
        if not path.is_file() or path.read_text(encoding="utf-8") != fresh
    ]
    if options.write:
        for path, fresh in stale:
            path.write_text(fresh, encoding="utf-8")
        return 0
    for path, _ in stale:
        name = path.relative_to(ROOT)
        print(f"{name}: what is generated is not what the code says; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
