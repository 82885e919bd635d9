"""``python -m afl_reproduction``: the paper's experiments, one command each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from afl.errors import AflError, ExitCode
from afl.terminal.entry import failed
from afl_cli.simulate import add_run_options


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m afl_reproduction",
        description="Repeat the paper's experiments: search step sizes, run, draw.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "experiment",
        metavar="EXPERIMENT",
        help="fashion-mnist, cifar10, scaling, many-workers, dual-rules, or a folder with an experiment.yaml",
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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is missing, then draw; returns the exit code."""
    try:
        return _run(make_parser().parse_args(arguments))
    except AflError as error:
        return failed("afl_reproduction", error)
    except KeyboardInterrupt:
        print("afl_reproduction: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _run(options: argparse.Namespace) -> ExitCode:
    if options.draw:
        from afl_reproduction.drawing import draw_stored  # noqa: PLC0415  # without PyTorch

        return draw_stored(options.experiment, options.results)
    from afl_reproduction.command import execute  # noqa: PLC0415  # PyTorch takes seconds to import

    return execute(options)


if __name__ == "__main__":
    sys.exit(main())
