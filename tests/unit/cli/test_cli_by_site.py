"""The table by site: the same figures everywhere, at any width."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from afl.runs.sites import SiteTable, sites_of
from afl.terminal.by_site import BySite
from afl_cli.main import main


def evaluation(round_: int, losses: list[float], aucs: list[float | None], **more: Any) -> dict[str, Any]:
    """An evaluation's line; a worker whose AUC is ``None`` is absent."""
    workers = [
        {} if auc is None else {"loss": loss, "auc": auc, "f1": 0.5}
        for loss, auc in zip(losses, aucs, strict=True)
    ]
    known = [auc for auc in aucs if auc is not None]
    ranking = {
        "rank_by": "auc",
        "better": "higher",
        "worst_value": min(known),
        "mean_value": sum(known) / len(known),
    }
    standing = {"mean_accuracy": None, "worst_accuracy": None, "mean_loss": 1.0, "max_loss": max(losses)}
    sent = {"uplink_bytes": 1, "downlink_bytes": 2, "worst_worker": aucs.index(min(known))}
    return {"event": "evaluation", "round": round_, "workers": workers, **standing, **sent, **ranking, **more}


LINES = [
    evaluation(10, [1.5, 0.5, 0.25], [0.5, 0.75, 0.8], examples=[60, 600, 3000], dual_weights=[1 / 3] * 3),
    evaluation(
        20, [1.25, 0.5, 0.2], [0.625, 0.75, 0.9], examples=[60, 600, 3000], dual_weights=[0.5, 0.25, 0.25]
    ),
    evaluation(
        30, [1.0, 0.5, 0.125], [0.6, 0.7, None], examples=[60, 600, 0], dual_weights=[0.75, 0.25, 0.0]
    ),
]
NAMED = [{**line, "sites": ["north", "'Süd'", None]} for line in LINES]


def shown(lines: list[dict[str, Any]], width: int, most: int | None = 20) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(BySite(SiteTable.of(lines), most))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def test_80_columns() -> None:
    assert (
        shown(NAMED, 80)
        == """\
By site

               test          auc   auc    auc  after  weight  weight
 site       records  loss  first  last   best  round   first    last   f1
 ─────────────────────────────────────────────────────────────────────────
 0 (north)       60     1    0.5   0.6  0.625     20   0.333    0.75  0.5
 1 ('Süd')      600   0.5   0.75   0.7   0.75     10   0.333    0.25  0.5
 2            3,000   0.2    0.8   0.9    0.9     20   0.333    0.25  0.5
"""
    )


def test_40_columns() -> None:
    assert (
        shown(NAMED, 40)
        == """\
By site
0 (north)
  auc 0.6, first 0.5, best 0.625 after
  round 20
  loss 1, 60 test records
  weight 0.333 at first, 0.75 at last
  f1 0.5
1 ('Süd')
  auc 0.7, first 0.75, best 0.75 after
  round 10
  loss 0.5, 600 test records
  weight 0.333 at first, 0.25 at last
  f1 0.5
2
  auc 0.9, first 0.8, best 0.9 after
  round 20
  loss 0.2, 3,000 test records
  weight 0.333 at first, 0.25 at last
  f1 0.5"""
    )


HIDDEN_LINES = [
    {
        "event": "evaluation",
        "round": round_,
        "worst_worker": None,
        "worst_accuracy": None,
        "mean_accuracy": accuracy,
        "max_loss": None,
        "smooth_worst_loss": 1.5,
        "mean_loss": 1.0,
        "means": {"loss": 1.0, "accuracy": accuracy},
    }
    for round_, accuracy in ((10, 0.5), (20, 0.75), (30, 0.625))
]


def test_with_hidden_losses_it_says_so_and_shows_means() -> None:
    assert (
        shown(HIDDEN_LINES, 80)
        == """\
Means over the sites

                 test        accuracy  accuracy  accuracy  after
 site         records  loss     first      last      best  round
 ────────────────────────────────────────────────────────────────
 mean of all              1    0.5000    0.6250    0.7500     20

losses are hidden: only means, and the smooth worst loss (at most
              ln(m)/50 above the largest), are known"""
    )


def test_of_many_those_that_are_served_worst_are_shown() -> None:
    lines = [evaluation(10, [1.0] * 50, [worker / 100 for worker in range(50)])]
    table = shown(lines, 100, most=3)
    assert [line.split()[0] for line in table.splitlines()[5:8]] == ["0", "1", "2"]
    assert "the 3 that are served worst, of 50" in table
    assert len(shown(lines, 100, most=None).splitlines()) > 50


def test_it_is_what_the_directory_and_inspect_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    rows = sites_of(tmp_path).rows
    assert [(row.first, row.last, row.best, row.best_round, row.records) for row in rows] == [
        (0.5, 0.6, 0.625, 20, 60),
        (0.75, 0.7, 0.75, 10, 600),
        (0.8, 0.9, 0.9, 20, 3000),
    ]
    assert [row.weights for row in rows] == [(1 / 3, 0.75), (1 / 3, 0.25), (1 / 3, 0.25)]
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert " ".join(shown(LINES, 100).split()) in " ".join(said.split())


def test_a_run_without_an_evaluation_has_none(tmp_path: Path) -> None:
    assert sites_of(tmp_path).rows == []
    assert not shown([], 80)
