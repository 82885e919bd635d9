"""``afl check``: a task tried before any federation."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from afl.errors import ConfigError, ExitCode, why_unwritable
from afl.paths import expanded
from afl.runs.durable import write_whole
from afl.terminal.parser import set_option
from afl.terminal.view import facts, make_console

if TYPE_CHECKING:
    from afl_lab.check import Report

HELP = "try a task before a run: data, loss, gradients, costs"

LIMIT_S: Final = 60.0
"""How long a check takes at most, or little more."""

_STYLES: Final = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = (
        "The exit code is 0 if a run can start, whatever the warnings; else that of the first error: 2 for"
        " the task's code, 5 for a loss or gradient that is not finite, 7 for data."
    )
    task = "file.py:Class, package.module:Class or an installed name (default: that of --config)"
    parser.add_argument("task", nargs="?", metavar="TASK", help=task)
    config = (
        "the configuration it will run with (default: AFL-Com that sends a tenth in integers, batches of 32)"
    )
    parser.add_argument("--config", type=expanded, metavar="FILE", help=config)
    workers = "the number of workers (default: the configuration's, or 3)"
    parser.add_argument("--workers", type=int, metavar="N", help=workers)
    set_option(parser)
    parser.add_argument("--strict", action="store_true", help="exit code 2 for warnings too")
    full = f"try everything, however long it takes (default: what can be tried in about {LIMIT_S:.0f} s)"
    parser.add_argument("--full", action="store_true", help=full)
    constants = "estimate smoothness and the loss's deviation too, and write them for afl theory --constants"
    parser.add_argument("--constants", type=expanded, metavar="FILE", help=constants)
    parser.add_argument("--json", action="store_true", help="print the findings and all figures as JSON")


def run(options: argparse.Namespace) -> ExitCode:
    """Check the task and print the findings; the exit code is that of the first error."""
    if options.task is None and options.config is None:
        raise ConfigError("name a task, such as task.py:MyTask, or a configuration with --config FILE")
    if options.config is None and options.set:
        raise ConfigError("--set overrides a key of a configuration; give one with --config FILE")
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: a whole number, at least 1")
    # PyTorch takes seconds to import.
    from afl_lab.check import check_config  # noqa: PLC0415
    from afl_lab.check.checker import configured  # noqa: PLC0415

    config = configured(options.config, options.task, options.workers, options.set)
    # A spinner where there is a terminal; what is printed goes to standard output alone.
    with Console(stderr=True).status("checking ...") as status:
        report = check_config(
            config,
            constants=options.constants is not None,
            limit_s=math.inf if options.full else LIMIT_S,
            watch=lambda what: status.update(Text(f"checking {what} ...")),
        )
    if options.constants is not None and "constants" in report.values:
        try:
            write_whole(options.constants, f"{json.dumps(report.values['constants'])}\n".encode())
        except OSError as error:
            raise ConfigError(f"--constants {options.constants}: {why_unwritable(error)}") from error
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print(make_console(), report)
    if options.strict and report.exit_code is ExitCode.OK and report.of_level("warning"):
        return ExitCode.CONFIG
    return report.exit_code


def _print(console: Console, report: Report) -> None:
    for title, rows in report.facts.items():
        console.print(facts(rows, title=title))
    for level, style in _STYLES.items():
        for finding in report.of_level(level):
            console.print(Text.assemble((level, style), str(finding).removeprefix(level)), soft_wrap=True)
    console.print(Text(report.verdict, style="bold"), soft_wrap=True)
