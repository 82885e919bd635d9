"""The commands and their options, for the reference: read from the parsers that the commands use."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import afl_server.main
import afl_worker.main
from afl_cli.main import make_afl_parser
from afl_reproduction.__main__ import make_parser as make_reproduction_parser


def commands_sections() -> str:
    """A section for each command, with a table of its arguments and options."""
    sections = []
    for parser in _parsers():
        description = " ".join((parser.description or "").split())
        sections.append(f"## {parser.prog}\n\n{_sentence(description)}\n\n{_table(parser)}")
    return "\n".join(sections)


def _parsers() -> Iterator[argparse.ArgumentParser]:
    """The daemons', and those of the subcommands of ``afl``."""
    yield afl_server.main.make_server_parser()
    yield afl_worker.main.make_worker_parser()
    for action in make_afl_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()
    yield make_reproduction_parser()


def _table(parser: argparse.ArgumentParser) -> str:
    rows = ["| argument | meaning |", "|---|---|"]
    for action in parser._actions:
        if (
            isinstance(action, argparse._HelpAction | argparse._VersionAction)
            or action.help == argparse.SUPPRESS
        ):
            continue
        meaning = " ".join((action.help or "").split()) % {**vars(action), "prog": parser.prog}
        rows.append(f"| `{_spelled(action)}` | {_cell(meaning)} |")
    return "\n".join(rows) + "\n"


def _spelled(action: argparse.Action) -> str:
    """An argument as it is typed."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else ""
    default = action.dest.upper() if action.option_strings else action.dest
    value = str(action.metavar or choices or default)
    if not action.option_strings:
        return _cell(f"{value}..." if action.nargs in {"+", "*"} else value)
    takes = "" if action.nargs == 0 else f" {value}{'...' if action.nargs in {'+', '*'} else ''}"
    return _cell(", ".join(action.option_strings) + takes)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
