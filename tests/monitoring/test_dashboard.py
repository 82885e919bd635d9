"""The dashboards: every query is of the chosen server or workers, and of what they have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from afl.daemon.metrics import Family
from afl_server.pages.metrics import FAMILIES
from afl_worker.pages import FAMILIES as WORKER_FAMILIES
from support import expressions

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"
SERVER = ("afl", 'job="$job",instance="$instance"', FAMILIES)
SITE = ("afl-site", 'job="$job",instance=~"$instance"', WORKER_FAMILIES)

of_each = pytest.mark.parametrize(("name", "chosen", "families"), [SERVER, SITE], ids=["server", "site"])


def board_of(name: str) -> dict[str, Any]:
    board: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return board


def targets_of(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    found = [(panel, target) for panel in board_of(name)["panels"] for target in panel.get("targets", ())]
    assert len(found) > {"afl": 50, "afl-site": 15}[name]
    return found


def labels_of(metric: str, families: Mapping[str, Family]) -> set[str]:
    """A process's own metrics are the Prometheus client's."""
    own = {"job", "instance"}
    return own if metric.startswith("process_") else own | set(families[metric].labels)


@of_each
def test_every_query_is_of_metrics_and_labels_that_there_are(
    name: str, chosen: str, families: Mapping[str, Family]
) -> None:
    del chosen
    for panel, target in targets_of(name):
        expression, name = target["expr"], panel["title"]
        metrics = expressions.metrics(expression)
        assert metrics, name
        labels = set().union(*(labels_of(metric, families) for metric in metrics))
        assert expressions.labels(expression) <= labels, name
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, name


@of_each
def test_every_query_is_of_what_was_chosen(name: str, chosen: str, families: Mapping[str, Family]) -> None:
    variables = {each["name"]: each for each in board_of(name)["templating"]["list"]}
    assert variables.keys() == {"source", "run", "job", "instance"}
    read = expressions.metrics(variables["run"]["query"])
    assert read == expressions.metrics(variables["instance"]["query"])
    assert read <= families.keys()
    for panel, target in targets_of(name):
        assert panel["datasource"]["uid"] == target["datasource"]["uid"] == "$source"
        for selector in expressions.selectors(target["expr"]):
            assert f"{{{chosen}" in selector, panel["title"]


@pytest.mark.parametrize("name", ["afl", "afl-site"])
def test_panels_lie_beside_each_other_and_say_what_they_show(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board_of(name)["panels"]:
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
