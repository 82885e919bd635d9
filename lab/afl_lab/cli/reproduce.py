"""``afl reproduce``: the paper's experiments, one command each."""

from __future__ import annotations

import argparse
from pathlib import Path

from afl.errors import ExitCode
from afl_lab.cli.simulate import add_run_options

HELP = "repeat the paper's experiments: search step sizes, run, draw"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "experiment",
        metavar="EXPERIMENT",
        help="fashion-mnist, cifar10, scaling, or a folder with an experiment.yaml",
    )
    parser.add_argument(
        "--parts", nargs="+", default=[], metavar="PART", help="parts of the experiment (default: all)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("docs/reproduction"),
        metavar="DIR",
        help="small files, tables and figures go to DIR/EXPERIMENT (default: docs/reproduction); "
        "runs and trials found there are not made again",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("reproductions"),
        metavar="DIR",
        help="run directories go to DIR/EXPERIMENT (default: reproductions)",
    )
    add_run_options(parser)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--search-only", action="store_true", help="search the step sizes, then stop")
    only.add_argument(
        "--skip-search", action="store_true", help="run with the step sizes that the configurations give"
    )
    only.add_argument("--draw", action="store_true", help="only draw, from the small files")


def run(options: argparse.Namespace) -> ExitCode:
    """Do what is missing, then draw."""
    if options.draw:
        from afl_lab.reproduction.drawing import draw_stored  # noqa: PLC0415  # without PyTorch

        return draw_stored(options.experiment, options.results)
    from afl_lab.reproduction.command import execute  # noqa: PLC0415  # PyTorch takes seconds to import

    return execute(options)
