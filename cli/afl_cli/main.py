"""``afl``: the command for people. Each subcommand is a module with ``HELP``, ``add_options`` and ``run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from afl.core.installed import entry_points
from afl.errors import AflError, ExitCode
from afl.paths import naming_paths
from afl.terminal.entry import failed
from afl.terminal.parser import make_parser
from afl_cli import audit, certs, check, export, inspect, new, policy, simulate, status, theory, tune
from afl_cli.federation import demo, run
from afl_cli.runs import plot, report
from afl_cli.site import capture


class _Command(Protocol):
    """A subcommand's module; ``run`` raises :class:`AflError` for what a person can put right."""

    __name__: str
    HELP: str

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, options: argparse.Namespace) -> ExitCode: ...


ENTRY_POINTS = "afl.commands"
"""The entry point group of further commands, of other packages."""


def commands() -> Mapping[str, _Command]:
    """The subcommands by name."""
    ours: list[_Command] = [audit, capture, certs, check, demo, export, inspect, new, plot, policy, run]
    ours += [report, simulate, status, theory, tune]
    own = {module.__name__.rpartition(".")[2]: module for module in ours}
    further = {point.name: point.load() for point in entry_points(group=ENTRY_POINTS)}
    return dict(sorted((further | own).items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand of ``afl``; returns the exit code."""
    options, unknown = make_afl_parser().parse_known_args(arguments)
    if unknown:
        # argparse would show the usage of `afl` itself.
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command: _Command = options.own
    try:
        with naming_paths():
            return command.run(options)
    except AflError as error:
        return failed(f"afl {options.command}", error)
    except KeyboardInterrupt:
        print(f"afl {options.command}: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def make_afl_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    what = "Agnostic federated learning: try it, watch it, look into its files."
    parser = make_parser("afl", f"{what} A run itself is afl-server and one afl-worker at each site.")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in commands().items():
        own = parsers.add_parser(name, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.add_options(own)
        own.set_defaults(own=command, parser=own)
    return parser
