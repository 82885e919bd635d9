"""The table by site on a terminal: in columns, or where these do not fit as a few lines for each site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from afl.outside import printable
from afl.runs.metrics import HIDDEN, MOST_SHOWN, number_of
from afl.runs.sites import SiteRow, SiteTable
from afl.terminal.view import table

MOST_SITES: Final = 20
"""Of more sites those that are served worst, unless everything is asked for."""


_ANY: Final = 10_000
"""Columns, more than any table takes."""


class BySite:
    """A :class:`afl.runs.sites.SiteTable`, in lines where room is short; nothing before an evaluation."""

    def __init__(self, sites: SiteTable, most: int | None = MOST_SITES) -> None:
        self._sites = sites
        self._rows = sites.worst_first(most)
        self._own = sites.own if most is None else sites.own[:MOST_SHOWN]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the widest form that fits."""
        if not self._rows or self._sites.by is None:
            return
        for count in range(len(self._own), -1, -1):
            columns = self._columns(self._own[:count])
            wanted = console.measure(columns, options=options.update(max_width=_ANY)).maximum
            if wanted <= options.max_width:
                yield columns
                return
        yield Text(self._title, style="bold")
        for row in self._rows:
            yield Text(row.label, style="bold")
            for line in self._lines(row):
                yield Padding(Text(line), (0, 0, 0, 2))
        if said := self._caption(self._own):
            yield Text(said, style="dim italic")

    @property
    def _title(self) -> str:
        return "Means over the sites" if self._sites.hides else "By site"

    @property
    def _metric(self) -> str:
        assert self._sites.by is not None
        return self._sites.by.metric

    def _columns(self, own: Sequence[str]) -> Table:
        metric, is_loss = self._metric, self._metric == "loss"
        heads = ["site", "test\nrecords>", *([] if is_loss else ["loss>"])]
        heads += [f"{metric}\n{when}>" for when in ("first", "last", "best")] + ["after\nround>"]
        heads += [] if self._sites.hides else ["weight\nfirst>", "weight\nlast>"]
        made = table(
            *heads,
            *(f"{name}>" for name in own),
            title=self._title,
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        made.columns[0].no_wrap = True
        made.caption = self._caption(own) or None
        for row in self._rows:
            values = (number_of(metric, value, 4) for value in (row.first, row.last, row.best))
            weights = [] if self._sites.hides else [_weight(weight) for weight in row.weights]
            made.add_row(
                row.label,
                "" if row.records is None else f"{row.records:,}",
                *([] if is_loss else [number_of("loss", row.metrics.get("loss"))]),
                *values,
                "" if row.best_round is None else str(row.best_round),
                *weights,
                *(number_of(name, row.metrics.get(name), 4) for name in own),
            )
        return made

    def _caption(self, own: Sequence[str]) -> str:
        left_out = len(self._sites.rows) - len(self._rows)
        metrics = [name for name in self._sites.own if name not in own]
        said = [
            f"losses are {HIDDEN}" if self._sites.hides else "",
            f"the {len(self._rows)} that are served worst, of {len(self._sites.rows)}" if left_out else "",
            f"measured too: {', '.join(map(printable, metrics[:MOST_SHOWN]))}" if metrics else "",
        ]
        return "; ".join(filter(None, said))

    def _lines(self, row: SiteRow) -> Iterator[str]:
        metric = self._metric
        first, last, best = (number_of(metric, value, 4) for value in (row.first, row.last, row.best))
        after = "" if row.best_round is None else f" after round {row.best_round}"
        yield f"{metric} {last}, first {first}, best {best}{after}"
        records = "" if row.records is None else f"{row.records:,} test records"
        loss = "" if metric == "loss" else f"loss {number_of('loss', row.metrics.get('loss'))}"
        if records or loss:
            yield ", ".join(filter(None, (loss, records)))
        if row.weights[1] is not None:
            yield f"weight {_weight(row.weights[0])} at first, {_weight(row.weights[1])} at last"
        if own := [f"{name} {number_of(name, row.metrics.get(name), 4)}" for name in self._own]:
            yield ", ".join(own)


def _weight(weight: float | None) -> str:
    return "" if weight is None else f"{weight:.3g}"
