"""Tables of the reference: metrics and exit codes."""

from __future__ import annotations

import ast
import inspect

from afl.errors import ExitCode
from afl_server.pages import metrics

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
