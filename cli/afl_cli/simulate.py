"""``afl simulate``: runs in one process each, without sockets, with a federation's results."""

from __future__ import annotations

import argparse
import os
import re
from argparse import ArgumentTypeError
from pathlib import Path

from afl.errors import ExitCode
from afl.paths import expanded
from afl.terminal.parser import set_option

HELP = "run whole federations in one process each, without sockets"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    configs = "configurations, as a server's"
    parser.add_argument("configs", nargs="+", type=expanded, metavar="CONFIG", help=configs)
    out = (
        "a run goes to DIR/CONFIG/seed-SEED (default: simulations), not to run.directory, which is for a"
        " server's run; runs found there are kept"
    )
    parser.add_argument("--out", type=expanded, default=Path("simulations"), metavar="DIR", help=out)
    add_run_options(parser)
    batched = "compute the workers' gradients in one call: faster, no longer equal to the bit"
    parser.add_argument("--batched", action="store_true", help=batched)
    parser.add_argument("--no-models", action="store_true", help="write metrics only, no models")
    ray = "run on the Ray cluster at ADDRESS (without one: a cluster that is started here)"
    parser.add_argument("--ray", nargs="?", const="local", metavar="ADDRESS", help=ray)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of what simulates many runs."""
    seeds = "seeds such as 1-5 or 1,4,9, a run each, instead of the configurations' own"
    parser.add_argument("--seeds", type=seeds_of, default=[], metavar="SEEDS", help=seeds)
    set_option(parser)
    jobs, cpus = "runs at a time (default: as many as there are CPUs)", os.cpu_count() or 1
    parser.add_argument("--jobs", type=positive, default=cpus, metavar="N", help=jobs)


def run(options: argparse.Namespace) -> ExitCode:
    """Simulate what is missing, then show all runs."""
    from afl_lab.simulation.command import execute  # noqa: PLC0415  # PyTorch takes seconds to import

    return execute(options)


def seeds_of(text: str) -> list[int]:
    """The seeds of ``1-5`` or ``1,4,9`` or both; raises ArgumentTypeError for any other text."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ArgumentTypeError(f"{part!r} is neither a seed nor a range of seeds such as 1-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= 10_000:
            raise ArgumentTypeError(f"{part!r} is not a range of at most 10,000 seeds")
        seeds.extend(range(first, last + 1))
    if len(set(seeds)) < len(seeds):
        raise ArgumentTypeError(f"{text!r} names a seed twice")
    return seeds


def positive(text: str) -> int:
    """A count, as an option has it."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a number of runs from 1")
    return int(text)
