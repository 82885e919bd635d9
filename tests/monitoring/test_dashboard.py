"""The dashboard: every query is of one chosen server, and of metrics and labels that it has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from afl_server.pages.metrics import FAMILIES
from support import expressions

BOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "afl.json").read_text("utf-8"))
TARGETS = [(panel, target) for panel in BOARD["panels"] for target in panel.get("targets", ())]

SERVER = 'job="$job",instance="$instance"'

SERVED: dict[str, set[str]] = {name: {"job", "instance", *family.labels} for name, family in FAMILIES.items()}


def labels_of(metric: str) -> set[str]:
    """A process's own metrics are the Prometheus client's."""
    return {"job", "instance"} if metric.startswith("process_") else SERVED[metric]


def test_every_query_is_of_metrics_and_labels_that_the_server_has() -> None:
    assert len(TARGETS) > 50
    for panel, target in TARGETS:
        expression, name = target["expr"], panel["title"]
        metrics = expressions.metrics(expression)
        assert metrics, name
        labels = set().union(*map(labels_of, metrics))
        assert expressions.labels(expression) <= labels, name
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, name


def test_every_query_is_of_the_server_that_was_chosen() -> None:
    names = {variable["name"] for variable in BOARD["templating"]["list"]}
    assert names == {"source", "run", "job", "instance"}
    for panel, target in TARGETS:
        assert panel["datasource"]["uid"] == target["datasource"]["uid"] == "$source"
        for selector in expressions.selectors(target["expr"]):
            assert f"{{{SERVER}" in selector, panel["title"]


def test_panels_lie_beside_each_other_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        assert panel["type"] == "row" or panel["description"].endswith(".")
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
