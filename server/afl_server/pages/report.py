"""One lasting HTML file of a run: the status page as it would be at the end, for people who were not there.

It is made of the page's own files, with all that they would ask for inside; a browser opens it from a disk.
Its policy lets it load nothing, and run no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final

import numpy as np

from afl.config import Config, load_config
from afl.core.messages import Kind
from afl.core.rounds.results import RoundSummary
from afl.errors import ConfigError, ExitCode
from afl.names import with_names
from afl.outside import plain
from afl.paths import kind_of, read_named
from afl.runs.export.source import State, state_of
from afl.runs.files import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    metrics_entries,
    of_event,
    read_summary,
)
from afl.runs.metrics import HIDDEN, number_of, over_blocks
from afl.runs.shapes import damage_named
from afl.runs.sites import SiteTable
from afl.wire.accounting import Traffic, WireCount
from afl_server.federation.counters import Counters
from afl_server.federation.evaluation_summary import Ranking, evaluation_of_line
from afl_server.federation.snapshot import Ending, OpenStep, RunDescription, Snapshot
from afl_server.network.door import Strangers
from afl_server.pages.dual_window import DualWindow
from afl_server.pages.history import Bucket, History
from afl_server.pages.live_updates import encoded
from afl_server.pages.page_data import MOST_ROWS, PageData, Sources
from afl_server.pages.recent_events import RecentEvents

MOST_CURVES: Final = 64
"""Workers that a report has curves of: 20 kB each at most."""

_SCRIPTS: Final = ("words", "charts", "link", "table", "page")
"""The page's modules, each after those that it imports."""


def report_of(directory: Path) -> str:
    """The report of the run in ``directory``, whatever state it is in.

    Raises:
        ConfigError: if no run is there.
        DataError: if its files are damaged.
    """
    for name in (CONFIG_FILE, METRICS_FILE):
        if kind_of(directory / name) != "file":
            raise ConfigError(f"{directory}: holds no run (no {name}); afl report takes a run's directory")
    config = load_config(directory / CONFIG_FILE, environment={})
    path = directory / METRICS_FILE
    with damage_named(str(path)):
        run = _Run(directory, config, metrics_entries(path)[0] if path.stat().st_size else [])
        return _page(run)


class _Run:
    """What a run directory holds, as the page's data is made of it."""

    def __init__(self, directory: Path, config: Config, entries: Sequence[Mapping[str, Any]]) -> None:
        self.directory, self.config = directory, config
        self.state, self.state_words = state_of(directory)
        path = directory / SUMMARY_FILE
        self.summary: Mapping[str, Any] = read_summary(path) if path.exists() else {}
        self.rounds, self.evaluations = of_event(entries, "round"), of_event(entries, "evaluation")
        self.sites = SiteTable.of(self.evaluations)
        self._history = History(config.workers)
        self._ranking = Ranking(by=config.evaluation.ranking, block=config.algorithm.restart_length)
        for line in self.evaluations:
            evaluation = evaluation_of_line(line)
            self._ranking.see(evaluation)
            self._history.add_evaluation(self._ranking.summary_of(evaluation), evaluation.metrics)
            self._add_round(line)
        events = RecentEvents()
        events.restore(directory / EVENTS_FILE)
        self._data = PageData(
            Sources(
                self._snapshot,
                lambda: None,
                self._history,
                DualWindow(config.workers),
                events,
                self.sites,
                Strangers,
            )
        )

    def _add_round(self, line: Mapping[str, Any]) -> None:
        weights = np.array(line.get("dual_weights", [math.nan] * self.config.workers))
        sent = line["uplink_bytes"] + line["downlink_bytes"]
        # Of an evaluation's round alone the metrics have each worker's weight.
        self._history.add_round(Bucket(line["round"], float(weights.max()), sent), weights)

    def _snapshot(self) -> Snapshot:
        config, summary, now = self.config, self.summary, time.monotonic()
        workers = config.workers
        last = {**self.rounds[-1]} if self.rounds else {"round": 0, "synchronization": 0}
        line = self.evaluations[-1] if self.evaluations else {}
        nothing = np.full(workers, np.nan)
        weights = np.array(line.get("dual_weights", nothing))
        sent = max(
            (self.rounds[-1:] + self.evaluations[-1:]), key=lambda each: each["uplink_bytes"], default={}
        )
        counters = Counters(_count(sent, "uplink"), _count(sent, "downlink"))
        whole = summary.get("uncompressed_bytes")
        if whole is not None:
            counters.saved_bytes = whole - counters.uncompressed_bytes
        seconds = summary.get("seconds", math.fsum(each["seconds"] for each in self.rounds))
        evaluation = None
        if line:
            evaluation = replace(evaluation_of_line(line), examples=tuple(line.get("examples", ())))
        return Snapshot(
            run=RunDescription(
                run_id=str(summary.get("run_id", self.directory.resolve().name)),
                task=config.task.name,
                algorithm=config.algorithm.name,
                directory=str(self.directory),
                workers=workers,
                rounds=config.algorithm.rounds,
                dim=0,
                restart_length=config.algorithm.restart_length,
                is_compressed=whole is not None and config.algorithm.takes("uplink"),
                keeps_residuals=False,
                hides_losses=config.privacy.losses == "hidden",
                record_privacy=config.privacy.record_words,
            ),
            began_at=now - seconds,
            ending=_ending(self.state, self.state_words),
            step=OpenStep(Kind.TRAIN, last["round"], last["synchronization"], now, (), 0),
            updates_applied=last["round"],
            last_round=RoundSummary(last["round"], last["synchronization"], nothing, weights),
            round_seconds=0.0,
            first_closed=None,
            step_seconds={},
            report_seconds=nothing.tolist(),
            outcome_seconds=0.0,
            dual_weights=weights,
            evaluation=evaluation,
            last=self._ranking.last,
            best=self._ranking.best,
            residual_norm=None,
            sessions=0,
            connections={},
            names={
                row.worker: name
                for row, name in zip(self.sites.rows, line.get("sites", ()), strict=False)
                if name and row.worker is not None
            }
            or config.names,
            known=range(workers),
            lost_at={},
            counters=counters,
            sum_restarts=0,
            incidents={},
            quarantined=(),
        )

    def documents(self) -> dict[str, Any]:
        """All that the page asks a server for."""
        state = self._data.state()
        warnings = plain(self.evaluations[-1].get("warnings", ())) if self.evaluations else ()
        said = [f"When this report was made, {self.state_words}.", *warnings]
        state["headline"] = with_names("\n".join(said), self._snapshot().names)
        documents = {"state": state, "ending": self._data.ending()}
        shown = documents["ending"]["workers"]["id"][:MOST_ROWS]
        for place, worker in enumerate(shown):
            found = self._data.worker(worker)
            if place >= MOST_CURVES:
                found.pop("curves", None)
            documents[f"data/worker.json?id={worker}"] = found
        return documents


def _count(line: Mapping[str, Any], way: str) -> WireCount:
    """The bytes of one direction, of which nothing is known but the sum."""
    count = WireCount(float_equivalents=line.get(f"{way}_float_equivalents", 0.0))
    count.wire[Traffic.GRADIENT] = line.get(f"{way}_bytes", 0)
    return count


def _ending(state: State, words: str) -> Ending:
    code = ExitCode.OK if state == "finished" else ExitCode.INTERRUPTED
    return Ending(code, words, can_resume=state != "aborted")


def _page(run: _Run) -> str:
    """The page with everything inside."""
    assets = files("afl_server.pages") / "assets"
    read = partial(_read, assets)
    style = read("uplot/uPlot.min.css") + read("page.css")
    scripts = (read("uplot/uPlot.iife.min.js"), _bundle(assets))
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    icon = base64.b64encode(read("icon.svg").encode()).decode()
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n<style>{style}</style>\n</head>'
    )
    # In a script's text no tag can end it, and none begin.
    saved = encoded(run.documents()).decode().replace("<", "\\u003c")
    tail = (
        f"{_by_site(run.sites, run.evaluations)}{_configuration(run)}{_licence(read('uplot/LICENSE.txt'))}"
        f'<script type="application/json" id="saved">{saved}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>"
    )
    page = re.sub(r"^<(link|script)\b.*\n", "", read("index.html"), flags=re.MULTILINE)
    page = re.sub(
        r"<noscript>.*?</noscript>", "<noscript><p>The charts need JavaScript.</p></noscript>", page
    )
    page = re.sub(r"<footer.*?</footer>\n", "", page, flags=re.DOTALL)
    return page.replace("</head>", head, 1).replace("</body>", tail, 1)


def _read(assets: Traversable, name: str) -> str:
    return assets.joinpath(*name.split("/")).read_text("utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _bundle(assets: Traversable) -> str:
    """The page's modules as one script, each in a function of its own: a file on a disk can import none."""
    parts = ['"use strict";', "const modules = {};"]
    for name in _SCRIPTS:
        source = _read(assets, f"{name}.js")
        exported = re.findall(r"^export (?:const|class|function) (\w+)", source, flags=re.MULTILINE)
        source = re.sub(
            r'^import (\{.*\}) from "\./(\w+)\.js";$', r"const \1 = modules.\2;", source, flags=re.MULTILINE
        )
        source = re.sub(r"^export ", "", source, flags=re.MULTILINE)
        parts.append(f"modules.{name} = (() => {{\n{source}return {{ {', '.join(exported)} }};\n}})();")
    return "\n".join(parts)


# What is there without a script too.


def _by_site(sites: SiteTable, evaluations: Sequence[Mapping[str, Any]]) -> str:
    by = sites.by
    if by is None:
        return ""
    own, is_loss = sites.own, by.metric == "loss"
    heads = ["Site", "Test records", *([] if is_loss else ["loss"])]
    heads += [f"{by.metric}, {when}" for when in ("first", "last", "best")] + ["after round"]
    heads += [] if sites.hides else ["weight, first", "weight, last"]
    rows = [
        [
            row.label,
            "" if row.records is None else f"{row.records:,}",
            *([] if is_loss else [number_of("loss", row.metrics.get("loss"))]),
            *(number_of(by.metric, value, 4) for value in (row.first, row.last, row.best)),
            "" if row.best_round is None else str(row.best_round),
            *([] if sites.hides else ["" if weight is None else f"{weight:.3g}" for weight in row.weights]),
            *(number_of(name, row.metrics.get(name), 4) for name in own),
        ]
        for row in sites.worst_first(MOST_ROWS)
    ]
    notes = [f"Losses are {HIDDEN}"] if sites.hides else []
    if over := over_blocks(evaluations):
        notes.append(f"Over whole blocks: {over}")
    note = "".join(f'<p class="quiet">{html.escape(each)}.</p>\n' for each in notes)
    table = _row("th", [*heads, *own]) + "".join(_row("td", cells) for cells in rows)
    return _section("By site", f'{note}<div class="scroll"><table id="by-site">\n{table}</table></div>')


def _row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def _configuration(run: _Run) -> str:
    text = read_named(run.directory / CONFIG_FILE).decode("utf-8", "replace")
    return _section("Configuration", f"<pre>{html.escape(text)}</pre>")


def _licence(text: str) -> str:
    shown = f"<details><summary>Charts by uPlot</summary><pre>{html.escape(text)}</pre></details>"
    return f'<footer class="quiet">{shown}</footer>\n'


def _section(title: str, content: str) -> str:
    return f'<section class="card saved"><h2>{html.escape(title)}</h2>\n{content}\n</section>\n'
