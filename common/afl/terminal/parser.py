"""What the commands' options have in common."""

from __future__ import annotations

import argparse

from afl._version import __version__
from afl.errors import ExitCode


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser whose help ends with the exit codes."""
    codes = "\n".join(f"  {int(code):>3}  {code.meaning}" for code in ExitCode)
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=f"exit codes:\n{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    return parser


def daemon_options(parser: argparse.ArgumentParser) -> None:
    """What both daemons take: how to end, for supervisors that restart whatever ends, and how to log."""
    parser.add_argument(
        "--stay",
        action="store_true",
        help="when the run has ended as configured, wait to be stopped instead of ending: for a supervisor "
        "that restarts every process that ends",
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=["debug", "info", "warning", "error"],
        help="lowest severity that is logged (default: info)",
    )
    parser.add_argument(
        "--json-logs",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="log JSON lines (default: where standard error is not a terminal)",
    )


def set_option(parser: argparse._ActionsContainer) -> None:
    """Overrides of a configuration's keys."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; may be repeated"
    )
