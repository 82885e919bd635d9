"""``afl plot``: compare runs in the paper's three views."""

from __future__ import annotations

import argparse
from pathlib import Path

from afl.errors import ExitCode
from afl.paths import expanded

HELP = "compare runs in figures, by rounds and by what was sent"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    runs = "run directories, or their metrics.jsonl; runs may still be running"
    parser.add_argument("runs", nargs="+", type=expanded, metavar="RUN", help=runs)
    label = "a run's name in the figures, once for each run in order (default: the directories' names)"
    parser.add_argument("--label", action="append", default=[], metavar="TEXT", help=label)
    out = "worst-accuracy, max-loss, ... go there as .png and .svg (default: plots)"
    parser.add_argument("--out", type=expanded, default=Path("plots"), metavar="DIR", help=out)
    parser.add_argument("--title", default="", metavar="TEXT", help="title of the figures")


def run(options: argparse.Namespace) -> ExitCode:
    """Draw the figures, and print where they are."""
    from afl_lab.plots.comparison import compare  # noqa: PLC0415  # numpy takes a moment to import

    compare(options.runs, options.label, options.out, options.title)
    return ExitCode.OK
