"""Which events the daemons log, where and how loudly: read from their source, for the docs' table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from afl.daemon.events import EVENTS

ROOT = Path(__file__).resolve().parents[3]

PLACES = {"common": "both", "server": "server", "worker": "worker"}
"""The folder of a package, and who logs what is in it."""

LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}

_LOGGERS = {"LOG", "logger"}


class UnnamedEventError(Exception):
    """A line is logged that is no event, or not in the form that this module reads."""


def sites() -> dict[str, set[tuple[str, str]]]:
    """Where each event is logged, and at which level, by its name.

    Raises:
        UnnamedEventError: if a call of a logger, but for debugging, has not ``extra=events.NAME(...).extra``.
    """
    by_class = {event.__name__: name for name, event in EVENTS.items()}
    found: dict[str, set[tuple[str, str]]] = {}
    for folder, place in PLACES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            for call, level in _calls(ast.parse(path.read_text(encoding="utf-8"))):
                event = _event(call)
                if event not in by_class:
                    where = f"{path.relative_to(ROOT)}:{call.lineno}"
                    raise UnnamedEventError(f"{where}: a logged line needs extra=events.NAME(...).extra")
                found.setdefault(by_class[event], set()).add((place, level))
    return found


def events_table() -> str:
    """Every event, in the order of :mod:`afl.daemon.events`."""
    logged = sites()
    rows = ["| event | logged by | level | what has happened | fields |", "|---|---|---|---|---|"]
    for name, event in EVENTS.items():
        places = {place for place, _ in logged[name]}
        where = "both" if len(places) > 1 else "".join(places)
        levels = [level for level in ("info", "warning", "error") if level in {at for _, at in logged[name]}]
        meaning = " ".join((event.__doc__ or "").split())
        told = "; ".join(f"`{field}`: {text}" for field, text in event.meanings().items())
        rows.append(f"| `{name}` | {where} | {' or '.join(levels)} | {meaning} | {told} |")
    return "\n".join(rows) + "\n"


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        logger, method = node.func.value, node.func.attr
        if isinstance(logger, ast.Name) and logger.id in _LOGGERS and method in LEVELS:
            yield node, LEVELS[method]


def _event(call: ast.Call) -> str:
    """The class in ``extra=events.CLASS(...).extra``; empty for anything else."""
    extra = next((keyword.value for keyword in call.keywords if keyword.arg == "extra"), None)
    match extra:
        case ast.Attribute(
            value=ast.Call(func=ast.Attribute(value=ast.Name(id="events"), attr=name)), attr="extra"
        ):
            return name
    return ""
