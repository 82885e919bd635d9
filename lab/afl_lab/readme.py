"""README.md's tables, those of the docs, and the files in deploy that are made from others or from code.

python -m afl_lab.readme --check    fail if one is not what the code says
python -m afl_lab.readme --write    write them again
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from afl.config import document
from afl.errors import ExitCode
from afl_lab.monitoring import logged, rules
from afl_server import metrics

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
OBSERVABILITY = ROOT / "docs" / "observability.md"

_COUNTERS = frozenset({"_count", "_counter"})
_GAUGES = frozenset({"_one", "_gauge", "_by_worker"})


def metrics_table() -> str:
    """Every metric of the server."""
    made = made_metrics()
    assert made.keys() == metrics.DOCUMENTATION.keys(), "metrics made and metrics documented differ"
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for name, meaning in metrics.DOCUMENTATION.items():
        kind, labels = made[name]
        shown = f"{name}_total" if kind == "counter" else name
        rows.append(f"| `{shown}` | {kind} | {', '.join(labels)} | {meaning} |")
    return "\n".join(rows) + "\n"


def exit_codes_table() -> str:
    """Every exit code of every command."""
    rows = ["| code | meaning |", "|---|---|"]
    rows += [f"| {int(code)} | {code.meaning} |" for code in ExitCode]
    return "\n".join(rows) + "\n"


Tables = Mapping[str, Callable[[], str]]

TABLES: Mapping[Path, Tables] = {
    README: {
        "config": document.markdown,
        "metrics": metrics_table,
        "exit codes": exit_codes_table,
    },
    OBSERVABILITY: {
        "events": logged.events_table,
        "alerts": rules.alerts_table,
    },
}
"""What is made anew within each document, between its markers."""


def fresh_files() -> Iterator[tuple[Path, str]]:
    """Every file with something made in it, and what it should hold.

    Raises:
        ValueError: if a document has not the markers of each of its tables once.
    """
    # Only developers have what makes the dashboard.
    from afl_lab.monitoring import dashboard  # noqa: PLC0415

    for path, tables in TABLES.items():
        yield path, with_tables(path.read_text(encoding="utf-8"), tables)
    yield rules.OPERATOR_RULES, rules.operator_rules()
    yield dashboard.FILE, dashboard.dashboard_json()


def with_tables(text: str, tables: Tables) -> str:
    """The text with each generated part made anew.

    Raises:
        ValueError: if it has not the markers of each once.
    """
    for name, make in tables.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end of generated: {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the document must have each of {begin!r} and {end!r} once")
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
        text = f"{head}{begin}\n{make()}\n{end}{tail}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m afl_lab.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    stale = [
        (path, fresh)
        for path, fresh in fresh_files()
        if not path.is_file() or path.read_text(encoding="utf-8") != fresh
    ]
    if options.write:
        for path, fresh in stale:
            path.write_text(fresh, encoding="utf-8")
        return 0
    for path, _ in stale:
        name = path.relative_to(ROOT)
        print(f"{name}: what is generated is not what the code says; run `make docs`", file=sys.stderr)
    return 1 if stale else 0


def made_metrics() -> dict[str, tuple[str, list[str]]]:
    """Kind and labels of each metric that the server's code makes.

    Read from its source: most of them exist only once a run has come far enough.
    """
    made = {}
    for node in ast.walk(ast.parse(inspect.getsource(metrics))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        name, maker = node.args[0], node.func.id
        if maker not in _COUNTERS | _GAUGES or not isinstance(name, ast.Constant):
            continue
        labels: list[str] = ["worker"] if maker == "_by_worker" else []
        if len(node.args) > 1 and isinstance(node.args[1], ast.List):
            labels = [str(ast.literal_eval(label)) for label in node.args[1].elts]
        made[str(name.value)] = ("counter" if maker in _COUNTERS else "gauge", labels)
    return made


if __name__ == "__main__":
    sys.exit(main())
