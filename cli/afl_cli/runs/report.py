"""``afl report``: one lasting HTML file of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from afl.errors import ConfigError, ExitCode, StorageError, why_unwritable
from afl.paths import expanded, kind_of
from afl.runs.durable import write_whole
from afl.terminal.view import make_console

HELP = "write a run's page, with everything in it, as one HTML file"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "run", type=expanded, metavar="RUN", help="the run's directory, in whatever state it is"
    )
    output = "the file to write; one that is there is replaced (default: report.html in the run's directory)"
    parser.add_argument("--output", type=expanded, metavar="FILE", help=output)


def run(options: argparse.Namespace) -> ExitCode:
    """Write the file, and say where it is."""
    from afl_server.pages.report import report_of  # noqa: PLC0415  # takes a moment to import

    directory: Path = options.run
    if kind_of(directory) != "folder":
        raise ConfigError(f"{directory}: no such directory; afl report takes a run's directory")
    page = report_of(directory)
    output: Path = options.output or directory / "report.html"
    try:
        write_whole(output, page.encode())
    except OSError as error:
        raise StorageError(
            f"--output {output} cannot be written: {why_unwritable(error)}; name another"
        ) from error
    make_console().print(f"written: {output}", soft_wrap=True)
    return ExitCode.OK
