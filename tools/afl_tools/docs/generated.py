"""Which documents hold something made from code, and what that is now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from afl_tools.docs import api, chart, commands, protocol, tables
from afl_tools.monitoring import logged, rules

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "docs" / "reference"

Tables = Mapping[str, Callable[[], str]]

TABLES: Mapping[Path, Tables] = {
    REFERENCE / "api.md": {"public names": api.api_table},
    REFERENCE / "configuration.md": {"config": tables.config_table},
    REFERENCE / "commands.md": {"commands": commands.commands_sections},
    REFERENCE / "metrics.md": {
        "metrics": tables.metrics_table,
        "worker metrics": tables.worker_metrics_table,
    },
    REFERENCE / "exit-codes.md": {"exit codes": tables.exit_codes_table},
    REFERENCE / "events.md": {"events": logged.events_table},
    REFERENCE / "messages.md": {"messages": protocol.messages_sections},
    ROOT / "docs" / "kubernetes.md": {"values": chart.values_table},
    ROOT / "docs" / "policy.md": {"policy": tables.policy_table},
    ROOT / "docs" / "observability.md": {"alerts": rules.alerts_table},
}
"""What is made anew within each document, between its markers."""


def fresh_files() -> Iterator[tuple[Path, str]]:
    """Every file with something made in it, and what it should hold.

    Raises:
        ValueError: if a document has not the markers of each of its tables once.
    """
    for path, made in TABLES.items():
        yield path, with_tables(path.read_text(encoding="utf-8"), made)


def with_tables(text: str, made: Tables) -> str:
    """The text with each generated part made anew.

    Raises:
        ValueError: if it has not the markers of each once.
    """
    for name, make in made.items():
        begin, end = f"<!-- generated: {name} -->\n", f"<!-- end of generated: {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the document must have each of {begin!r} and {end!r} once")
        head, _, rest = text.partition(begin)
        tail = rest.partition(end)[2]
        text = f"{head}{begin}\n{make()}\n{end}{tail}"
    return text
