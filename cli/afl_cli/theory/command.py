"""``afl theory``: what the paper's theorems say of a run, before it is started."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

from afl.errors import ExitCode
from afl.terminal.view import make_console
from afl_cli.theory.answer import answer
from afl_cli.theory.question import read_question
from afl_cli.theory.view import sections

HELP = "step sizes, bounds and costs that the paper gives for a run"

LARGEST = 1e12
"""Beyond it, the bounds' powers would leave the range of a double."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.description = (
        "Step sizes and block length for a run's size; how much a compressor may drop; and, where the "
        "constants of the problem are given, the theorem's bound with its terms. See docs/theory.md."
    )
    size = parser.add_argument_group("the run")
    size.add_argument("--workers", type=_whole, metavar="m", help="number of workers")
    size.add_argument("--rounds", type=_whole, metavar="T", help="number of update rounds")
    size.add_argument("--dim", type=_whole, metavar="d", help="number of trainable parameters")
    size.add_argument("--compressor", metavar="NAME", help="compressor both ways, such as rand-k")
    size.add_argument("--ratio", type=_ratio, metavar="SHARE", help="share of the coordinates it keeps")
    size.add_argument(
        "--config", type=Path, metavar="FILE", help="take these, and L and sigma_q, from a configuration"
    )
    size.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the configuration; may be repeated",
    )
    problem = parser.add_argument_group("constants of the problem (estimates will do for step sizes)")
    positive = _number(lowest=0.0)
    problem.add_argument("--smoothness", type=positive, metavar="L", help="smoothness of the workers' risks")
    problem.add_argument(
        "--sigma-q", type=positive, metavar="s", help="sub-Gaussian parameter of a minibatch's loss"
    )
    problem.add_argument("--gradient-bound", type=positive, metavar="G", help="norm of a risk's gradient")
    problem.add_argument(
        "--sigma-w",
        type=_number(lowest=0.0, inclusive=True),
        metavar="s",
        help="standard deviation of a minibatch's gradient (Euclidean norm)",
    )
    problem.add_argument(
        "--delta-phi",
        type=_number(lowest=0.0, inclusive=True),
        metavar="D",
        help="how far the first model's worst loss is above the best possible one",
    )
    parser.add_argument(
        "--epsilon",
        type=_number(lowest=1e-6, inclusive=True),
        default=0.1,
        metavar="E",
        help="target for the norm of the stationarity measure (default: 0.1)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(options: argparse.Namespace) -> ExitCode:
    """Print it."""
    found = answer(read_question(options))
    if options.json:
        print(json.dumps(found, indent=2))
        return ExitCode.OK
    console = make_console()
    for index, section in enumerate(sections(found)):
        if index:
            console.print()
        console.print(section)
    return ExitCode.OK


def _whole(text: str) -> int:
    """A whole number from 1 to ``LARGEST``."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {LARGEST:g}")
    return value


def _number(lowest: float, *, inclusive: bool = False) -> Callable[[str], float]:
    """A reader of finite numbers from ``lowest`` to ``LARGEST``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not ((value >= lowest if inclusive else value > lowest) and value <= LARGEST):
            bounds = f"from {lowest:g}" if inclusive else f"above {lowest:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {bounds} to {LARGEST:g}")
        return value

    return read


def _ratio(text: str) -> float | str:
    """A share in (0, 1], or ``theory``."""
    if text == "theory":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number above 0 and at most 1, nor theory")
    return value
