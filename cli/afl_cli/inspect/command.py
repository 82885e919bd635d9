"""``afl inspect``: what a file of a run holds, or a whole run directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from afl.errors import ExitCode
from afl.terminal.view import make_console

HELP = "show what a file or directory of a run holds"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument(
        "path",
        type=Path,
        metavar="FILE",
        help="a model (.safetensors), metrics.jsonl, summary.json, a configuration (.yaml), "
        "or a directory with them",
    )
    parser.add_argument(
        "--all", action="store_true", help="show every evaluation and parameter, however many there are"
    )


def run(options: argparse.Namespace) -> ExitCode:
    """Print it."""
    # Models are read with torch, which the other commands start without.
    from afl_cli.inspect.files import describe  # noqa: PLC0415

    console = make_console()
    sections = describe(options.path, everything=options.all)
    for index, section in enumerate(sections):
        if index:
            console.print()
        console.print(section)
    return ExitCode.OK
