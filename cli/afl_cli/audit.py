"""``afl audit``: what left a site, and whether its log is as it was written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Final

from rich.console import RenderableType

from afl.config.problems import shown
from afl.config.quantities import shown_bytes
from afl.errors import ConfigError, DataError, ExitCode
from afl.paths import expanded
from afl.site.audit import BEGINNING, KIND, NOTHING, PREVIOUS, Link, begin_after, read_log
from afl.terminal.view import facts, make_console, table

HELP = "check and show the log of what left a site"

MOST_ROWS: Final = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "The exit code is 7 if a log is not as it was written; the first such line is named."
    files = "an audit log, or several that go on from each other, the oldest first"
    parser.add_argument("files", nargs="+", type=expanded, metavar="FILE", help=files)
    parser.add_argument("--all", action="store_true", help=f"show every line, not only the last {MOST_ROWS}")
    parser.add_argument("--json", action="store_true", help="print the findings and every line as JSON")
    after = "begin a new log there that goes on from the last FILE (between two starts of the worker)"
    parser.add_argument("--next", type=expanded, metavar="NEW", help=after)


def run(options: argparse.Namespace) -> ExitCode:
    """Check the logs in their order, show their lines, and begin a new one if that is asked."""
    found, broken = _checked(options.files)
    if options.json:
        last = found[-1].hash if found else None
        lines = [{"line": link.number, "hash": link.hash, **link.entry} for link in found]
        about = {"intact": broken is None, "broken": broken and str(broken), "last_hash": last}
        print(json.dumps({**about, "lines": lines}, indent=2))
    else:
        console = make_console()
        for part in _shown(options.files, found, everything=options.all):
            console.print(part)
    if broken is not None:
        raise broken
    if options.next is not None:
        if not found:
            raise ConfigError(f"--next: {options.files[-1]} is empty; there is nothing to go on from")
        begin_after(found[-1], options.next, options.files[-1])
        print(f"{options.next} goes on from {options.files[-1]}")
    return ExitCode.OK


def _checked(files: list[Path]) -> tuple[list[Link], DataError | None]:
    """The lines up to the first broken one, and what is wrong with that."""
    found: list[Link] = []
    try:
        for path in files:
            for link in read_log(path, found[-1] if found else NOTHING):
                found.append(link)  # noqa: PERF402  # those before a broken one count
    except DataError as error:
        return found, error
    return found, None


def _shown(files: list[Path], found: list[Link], *, everything: bool) -> list[RenderableType]:
    rows: dict[str, RenderableType] = {"lines": f"{len(found):,} that follow from each other"}
    if found:
        before = found[0].entry[PREVIOUS]
        goes_on = "the beginning" if before == BEGINNING else f"goes on from {before}"
        rows["first"] = f"{_text(found[0], 'time')}, {goes_on}"
        rows["last"] = f"{_text(found[-1], 'time')}, its hash is {found[-1].hash}"
        rows["payloads"] = shown_bytes(sum(_count(link) for link in found))
        rows["note"] = (
            "what was removed at the end leaves no trace: compare the last hash with one noted before"
        )
    named = ", ".join(map(str, files))
    kept = found if everything else found[-MOST_ROWS:]
    columns = ("line>", "time (UTC)", "workers", "round>", "what", "bytes>", "SHA-256", "told")
    lines = table(*columns, title="What left")
    lines.columns[1].no_wrap = True
    for link in kept:
        again = " again" * (link.entry.get("again") is True)
        lines.add_row(
            str(link.number),
            _text(link, "time")[:19],
            _text(link, "workers"),
            _text(link, "round"),
            f"{_text(link, 'kind')}{again}",
            f"{_count(link):,}",
            _text(link, "digest")[:12],
            _told(link),
        )
    if len(kept) < len(found):
        lines.caption = f"the last {len(kept)} of {len(found):,} lines (--all shows every one)"
    return [facts(rows, title=f"Audit log {named}"), lines]


def _text(link: Link, name: str) -> str:
    """A value on one line that a terminal can show, whoever has worded it; text without its quotes."""
    value = link.entry.get(name)
    return "" if value is None else shown(value).strip('"[]')


def _count(link: Link) -> int:
    value = link.entry.get("bytes")
    return value if isinstance(value, int) else 0


def _told(link: Link) -> str:
    """What it says of a run that was joined, else the names of what was told."""
    told = link.entry.get("told")
    if not isinstance(told, dict):
        return _text(link, "from")
    if _text(link, KIND) == "joined":
        return f"run {_text(link, 'run')}: {', '.join(shown(told.get(key)) for key in ('server', 'task'))}"
    names = [f"metrics {shown(value)}" if name == "metrics" else name for name, value in told.items()]
    return shown(", ".join(names)).strip('"').replace('\\"', "")
