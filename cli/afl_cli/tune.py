"""``afl tune``: a search for a run's settings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from afl.config import load_config
from afl.errors import ExitCode
from afl.optional_dependencies import check_installed
from afl.paths import expanded
from afl.terminal.parser import set_option
from afl_cli.federation.served import Served
from afl_cli.simulate import positive
from afl_cli.theory import positive as above_zero

HELP = "find the settings that serve the worst worker best"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.description = (
        "Search step sizes, block length, bits and weight decay by the worst worker's"
        " value on held-out records; then compare the best on test records, and write it as a configuration."
    )
    parser.add_argument("config", type=expanded, metavar="CONFIG", help="the run's configuration (YAML)")
    trials = "how many trials there are in all, those of an earlier call included (default: 40)"
    parser.add_argument("--trials", type=positive, metavar="N", help=trials)
    minutes = "begin no further trials after so long"
    parser.add_argument("--minutes", type=above_zero, metavar="M", help=minutes)
    output = "where the chosen configuration goes (default: CONFIG's name with .tuned.yaml)"
    parser.add_argument("--output", type=expanded, metavar="FILE", help=output)
    out = "trials go to DIR/CONFIG, and a search that is there goes on (default: tuning)"
    parser.add_argument("--out", type=expanded, default=Path("tuning"), metavar="DIR", help=out)
    lost = (
        "how much less than under plain averaging a site may have of a metric between 0 and 1, such as AUC;"
        " of any other, which share of it; 1: all of it (default: 0.05)"
    )
    parser.add_argument("--most-lost", type=above_zero, default=0.05, metavar="LOST", help=lost)
    federation = (
        "run the trials over a real federation, one after the other: a server as CONFIG has it, for workers"
        " that were started with --again"
    )
    parser.add_argument("--federation", action="store_true", help=federation)
    set_option(parser)
    jobs, cpus = "trials at a time, at most 4 (default: as many as there are CPUs)", os.cpu_count() or 1
    parser.add_argument("--jobs", type=positive, default=cpus, metavar="N", help=jobs)


def run(options: argparse.Namespace) -> ExitCode:
    """Search, and show what was found."""
    check_installed("optuna", "tune", "tune")
    federation = Served(load_config(options.config, options.set)) if options.federation else None
    # PyTorch takes seconds to import.
    from afl_lab.tuning.command import execute  # noqa: PLC0415

    return execute(options, federation)
