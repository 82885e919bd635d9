"""Which events the daemons log, where and how loudly: read from their source, for the docs' table."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
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
            for call, level, event in _calls(ast.parse(path.read_text(encoding="utf-8"))):
                if event not in by_class:
                    where = f"{path.relative_to(ROOT)}:{call.lineno}"
                    raise UnnamedEventError(
                        f"{where}: a logged line needs extra=events.NAME(...).extra, and an effect Log an "
                        "event made in the same function"
                    )
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


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Calls of a logger, and the federation's ``Log`` effects: each with its level and its event's class,
    which is empty where it has none."""
    made = _made(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=logger), attr=method)) if (
                logger in _LOGGERS and method in LEVELS
            ):
                extra = next((keyword.value for keyword in node.keywords if keyword.arg == "extra"), None)
                event = extra.value if isinstance(extra, ast.Attribute) and extra.attr == "extra" else None
                yield node, LEVELS[method], _class(event, made)
            case ast.Call(func=ast.Name(id="Log"), args=[ast.Constant(value=str(level)), _, event, *_]):
                yield node, level.lower(), _class(event, made)


def _made(tree: ast.AST) -> dict[str, str]:
    """Events that are given a name, which then stands for one class in the whole file."""
    return {
        name: kind
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and (kind := _class(node.value, {}))
        for target in node.targets
        if isinstance(target, ast.Name) and (name := target.id)
    }


def _class(event: ast.AST | None, made: Mapping[str, str]) -> str:
    """The class in ``events.CLASS(...)``, or of what was made so; empty for anything else."""
    match event:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="events" | "log_events"), attr=name)):
            return name
        case ast.Name(id=name):
            return made.get(name, "")
    return ""
