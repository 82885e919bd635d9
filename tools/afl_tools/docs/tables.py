"""Tables of the reference: the configuration's keys, metrics and exit codes."""

from __future__ import annotations

import ast
import inspect

from afl.config.document import all_keys
from afl.errors import ExitCode
from afl_server.pages import metrics

_COUNTERS = frozenset({"_count", "_counter"})
_GAUGES = frozenset({"_one", "_gauge", "_by_worker"})


def config_table() -> str:
    """Every key of the configuration."""
    rows = ["| key | meaning | accepted | default | unit |", "|---|---|---|---|---|"]
    for key in all_keys():
        default = key.default if key.default in {"", "required"} else f"`{key.default}`"
        cells = [f"`{key.name}`", key.description, key.accepts, default, key.unit]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


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
