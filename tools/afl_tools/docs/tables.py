"""Tables of the reference: the configuration's keys, metrics and exit codes."""

from __future__ import annotations

from collections.abc import Mapping

from afl.config.document import all_keys
from afl.config.schema import Config, Section
from afl.daemon.metrics import Family
from afl.errors import ExitCode
from afl.site.policy import Policy
from afl_server.pages.metrics import FAMILIES
from afl_worker.pages import FAMILIES as WORKER_FAMILIES


def config_table(of: type[Section] = Config) -> str:
    """Every key of the configuration, or of another file like it."""
    rows = ["| key | meaning | accepted | default | unit |", "|---|---|---|---|---|"]
    for key in all_keys(of):
        default = key.default if key.default in {"", "required"} else f"`{key.default}`"
        cells = [f"`{key.name}`", key.description, key.accepts, default, key.unit]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def policy_table() -> str:
    """Every key of a site's policy."""
    return config_table(Policy)


def metrics_table(of: Mapping[str, Family] = FAMILIES) -> str:
    """Every metric of the server, or of another daemon."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for name, family in of.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        rows.append(f"| `{name}` | {kind} | {', '.join(family.labels)} | {family.meaning} |")
    return "\n".join(rows) + "\n"


def worker_metrics_table() -> str:
    """Every metric of a worker's process."""
    return metrics_table(WORKER_FAMILIES)


def exit_codes_table() -> str:
    """Every exit code of every command."""
    rows = ["| code | meaning |", "|---|---|"]
    rows += [f"| {int(code)} | {code.meaning} |" for code in ExitCode]
    return "\n".join(rows) + "\n"
