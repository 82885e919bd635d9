"""What runs over emulated links took, in a file of JSON lines, and the table made of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from afl.errors import ConfigError
from afl_benchmarks.links.proxy import PAYLOAD_SHARE


@dataclass(frozen=True)
class Point:
    """An evaluation.

    Attributes:
        round: after this update.
        seconds: from the first step's opening to the evaluation's close.
        up: bytes of gRPC messages from all workers so far.
        down: the same to them.
    """

    round: int
    seconds: float
    worst_accuracy: float
    up: int
    down: int


@dataclass(frozen=True)
class LinkRun:
    """A run.

    Attributes:
        method: the label of the table.
        links: how they were made: ``none``, ``proxy`` or ``namespaces``.
        mbit: rate of each worker's link each way, in 10^6 bit/s; 0 for none.
        round_trip_ms: of each link.
        rounds: that were closed.
        round_seconds: of each round but the first; evaluations are apart.
        carried_up: what came through all links in the whole run, to the server, in the unit of ``links``.
        messages_up: bytes of gRPC messages in the whole run.
        path: checksum of largest and mean loss and largest dual weight of each round until the last point.
    """

    method: str
    links: str
    mbit: float
    round_trip_ms: float
    seed: int
    rounds: int
    round_seconds: float
    carried_up: int
    carried_down: int
    messages_up: int
    messages_down: int
    path: str
    machine: str
    settings: dict[str, Any]
    points: list[Point]

    @classmethod
    def read(cls, text: str) -> Self:
        """From a line."""
        values = json.loads(text)
        return cls(**{**values, "points": [Point(*point) for point in values["points"]]})

    def line(self) -> str:
        """As a line."""
        return json.dumps({**asdict(self), "points": [list(asdict(point).values()) for point in self.points]})

    def reached(self, target: float) -> Point | None:
        """The first evaluation whose worst worker is served so well."""
        return next((point for point in self.points if point.worst_accuracy >= target), None)


def read_runs(path: Path) -> list[LinkRun]:
    """The runs in a file.

    Raises:
        ConfigError: if a line is none.
    """
    runs = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            runs.append(LinkRun.read(text))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path}:{number} is no run over links: {error}") from error
    return runs


def add_run(path: Path, run: LinkRun) -> None:
    """Write it down; it takes the place of one of the same method over the same links."""

    def kind(of: LinkRun) -> tuple[object, ...]:
        return of.method, of.links, of.mbit, of.round_trip_ms, of.seed

    others = [each for each in read_runs(path) if kind(each) != kind(run)] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{each.line()}\n" for each in [*others, run]), encoding="utf-8")


def table(runs: Sequence[LinkRun], targets: Sequence[float]) -> str:
    """Markdown: a row for each method, links and target; a target that no run reaches is left out."""
    methods = list(dict.fromkeys(run.method for run in runs))
    lines = [
        "| worst accuracy | method | links | rounds | seconds | MB up | MB down | seconds a round |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for target in targets:
        if not any(run.reached(target) for run in runs):
            continue
        for method in methods:
            for run in sorted((run for run in runs if run.method == method), key=lambda each: each.mbit == 0):
                point = run.reached(target)
                cells = (
                    [f"not in {run.rounds}", "-", "-", "-"]
                    if point is None
                    else [
                        f"{point.round:,}",
                        f"{point.seconds:,.0f}",
                        f"{point.up / 1e6:,.0f}",
                        f"{point.down / 1e6:,.0f}",
                    ]
                )
                cells = [f"≥ {target:g}", method, _links(run), *cells, f"{run.round_seconds:.3f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def overhead_table(runs: Sequence[LinkRun]) -> str:
    """Markdown: what the links carried beside the gRPC messages, and their share of a round, over whole runs.

    The links alone: a round's bytes up, then down, at the link's rate, and one round trip. What a round takes
    more is the processes' own.
    """
    lines = [
        "| method | links | rounds | MB of messages | MB carried | more | s a round | links alone, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        if run.mbit == 0:
            continue
        messages = run.messages_up + run.messages_down
        carried = run.carried_up + run.carried_down
        lines.append(
            f"| {run.method} | {_links(run)} | {run.rounds} | {messages / 1e6:,.1f} | {carried / 1e6:,.1f} "
            f"| {carried / messages - 1:.2%} | {run.round_seconds:.3f} | {_of_links(run):.3f} |"
        )
    return "\n".join(lines) + "\n"


def median_round(seconds: Sequence[float]) -> float:
    """Of all rounds but the first, which waits for the workers to have warmed up."""
    return round(statistics.median(seconds[1:] or seconds), 4)


def _of_links(run: LinkRun) -> float:
    """Seconds that a round's bytes take on a worker's link."""
    size = (run.messages_up + run.messages_down) / run.rounds / int(run.settings["workers"])
    return size / (PAYLOAD_SHARE * run.mbit * 1e6 / 8) + run.round_trip_ms / 1e3


def _links(run: LinkRun) -> str:
    if run.mbit == 0:
        return "loopback"
    return f"{run.mbit:g} Mbit/s, {run.round_trip_ms:g} ms"
