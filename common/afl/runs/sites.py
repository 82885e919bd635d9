"""How each site has fared in a run: one line for each, from the evaluations' lines of the metrics.

Whoever shows a table by site takes it from here, so that the terminal, the page, a card and a report agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afl.names import named, names_of
from afl.runs.files import METRICS_FILE, metrics_entries, of_event
from afl.runs.metrics import Ranked, ranked


@dataclass
class SiteRow:
    """One site, or with hidden losses the mean over all.

    Attributes:
        worker: its id; ``None`` for the mean.
        label: what people call it: ``2 (north)``.
        records: how many test records it has; ``None`` where that is not known.
        metrics: at the last evaluation that it took part in, by name.
        first: its value of the metric that ranks at the first one, ``last`` at the last.
        best: the best of all, after ``best_round``; of equals the first.
        weights: its dual weight at the first and the last; ``None`` where that is not known.
    """

    worker: int | None
    label: str
    records: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None
    best: float | None = None
    best_round: int | None = None
    weights: tuple[float | None, float | None] = (None, None)

    def see(self, round_: int, by: Ranked, metrics: Mapping[str, float], weight: float | None) -> None:
        """Take the next evaluation that the site took part in."""
        value = metrics.get(by.metric)
        if not self.metrics:
            self.weights = (weight, weight)
        self.weights = (self.weights[0], weight)
        self.metrics = dict(metrics)
        if value is None:
            return
        self.first = value if self.first is None else self.first
        self.last = value
        is_better = self.best is None or (value > self.best if by.higher_is_better else value < self.best)
        if is_better:
            self.best, self.best_round = value, round_


class SiteTable:
    """All sites of a run, by worker id, as evaluation follows evaluation.

    Attributes:
        rows: one for each worker; with hidden losses one alone, of means.
        hides: whether losses are hidden.
        by: by what the last evaluation was ranked; ``None`` before the first.
    """

    def __init__(self) -> None:
        self.rows: list[SiteRow] = []
        self.hides = False
        self.by: Ranked | None = None

    @classmethod
    def of(cls, evaluations: Iterable[Mapping[str, Any]]) -> SiteTable:
        """From lines of the metrics, by round."""
        table = cls()
        for line in evaluations:
            table.see(line)
        return table

    @property
    def own(self) -> list[str]:
        """The names of the metrics besides loss and what ranks."""
        shown = {"loss"} if self.by is None else {"loss", self.by.metric}
        return sorted({name for row in self.rows for name in row.metrics} - shown)

    def see(self, line: Mapping[str, Any]) -> None:
        """Take the next evaluation's line."""
        by = ranked(line)
        if self.by is not None and by.metric != self.by.metric:
            # Nobody reported the old one: values of two metrics have no first, last and best together.
            for row in self.rows:
                row.first = row.last = row.best = row.best_round = None
        self.by = by
        if line.get("means"):
            self.hides = True
            self.rows = self.rows or [SiteRow(None, "mean of all")]
            self.rows[0].see(line["round"], by, line["means"], None)
            return
        workers, names = line.get("workers", ()), names_of(line)
        examples, weights = line.get("examples", ()), line.get("dual_weights", ())
        self.rows += [SiteRow(worker, str(worker)) for worker in range(len(self.rows), len(workers))]
        for row, metrics in zip(self.rows, workers, strict=False):
            worker = row.worker
            assert worker is not None
            row.label = named(worker, names)
            if metrics:
                row.records = examples[worker] if worker < len(examples) else None
                row.see(line["round"], by, metrics, weights[worker] if worker < len(weights) else None)

    def worst_first(self, most: int | None = None) -> Sequence[SiteRow]:
        """The rows by worker id; of more than ``most`` those that are served worst, worst first."""
        if most is None or len(self.rows) <= most or self.by is None:
            return self.rows
        sign = 1 if self.by.higher_is_better else -1
        known = [row for row in self.rows if row.last is not None]
        return sorted(known, key=lambda row: sign * (row.last or 0.0))[:most]


def sites_of(directory: Path) -> SiteTable:
    """The table of a run directory, as far as its metrics go.

    Raises:
        DataError: if they are damaged.
    """
    path = directory / METRICS_FILE
    entries = metrics_entries(path)[0] if path.exists() and path.stat().st_size else []
    return SiteTable.of(of_event(entries, "evaluation"))
