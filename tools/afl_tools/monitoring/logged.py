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
_MODULES = {"events", "log_events"}


class UnnamedEventError(Exception):
    """A line is logged that is no event, or not in the form that this module reads."""


def sites() -> dict[str, set[tuple[str, str]]]:
    """Where each event is logged, and at which level, by its name.

    A line is a call of a logger with ``extra=EVENT.extra``, or of a machine that does not log itself:
    ``log(LEVEL, message, EVENT)``, ``log_rarely(LEVEL, kind, message, EVENT)`` or ``log_of_worker(LEVEL,
    worker, message, EVENT)``. EVENT is made there, or earlier in the same function.

    Raises:
        UnnamedEventError: if a line, but for debugging, has no such event.
    """
    by_class = {event.__name__: name for name, event in EVENTS.items()}
    found: dict[str, set[tuple[str, str]]] = {}
    for folder, place in PLACES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, level, event in _lines(ast.parse(path.read_text(encoding="utf-8")), {}):
                if event not in by_class:
                    where = f"{path.relative_to(ROOT)}:{line}"
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


def _lines(node: ast.AST, made: dict[str, str]) -> Iterator[tuple[int, str, str]]:
    """The lines that are logged below a node: where, at which level, and the event's class or nothing.

    Args:
        made: classes of the events that variables hold.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        made = {}
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Assign(targets=[ast.Name(id=variable)], value=value) if _event(value, made):
                made[variable] = _event(value, made)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=method)) if (
                logger in _LOGGERS and method in LEVELS
            ):
                extra = next((each.value for each in child.keywords if each.arg == "extra"), None)
                is_event = isinstance(extra, ast.Attribute) and extra.attr == "extra"
                event = _event(extra.value, made) if is_event and isinstance(extra, ast.Attribute) else ""
                yield child.lineno, LEVELS[method], event
            case ast.Call(
                func=ast.Attribute(attr="log"), args=[ast.Constant(value=str(level)), _, event, *_]
            ):
                yield child.lineno, LEVELS[level.lower()], _event(event, made)
            case ast.Call(
                func=ast.Attribute(attr="log_rarely" | "log_of_worker"),
                args=[ast.Constant(value=str(level)), _, _, event, *_],
            ):
                yield child.lineno, LEVELS[level.lower()], _event(event, made)
        yield from _lines(child, made)


def _event(node: ast.expr, made: dict[str, str]) -> str:
    """The class of an event that an expression makes or names; empty for anything else."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)) if module in _MODULES:
            return name
        case ast.Name(id=variable):
            return made.get(variable, "")
    return ""
