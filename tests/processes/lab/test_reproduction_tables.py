"""Tables and figures from small files whose numbers are known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afl.errors import ConfigError
from afl_lab.plots.points import Point
from afl_reproduction.condensed import CondensedRun, read_run, run_file
from afl_reproduction.experiment import Targets
from afl_reproduction.tables import Spread, curve_of, markdown, reached, standing, to_targets

CONFIG = {
    "workers": 2,
    "task": {"name": "digits"},
    "algorithm": {"name": "sgda", "rounds": 40, "eta_w": 0.1, "eta_q": 0.1},
    "run": {"seed": 1},
}


def run_of(seed: int, accuracies: list[float], **about: Any) -> CondensedRun:
    """An evaluation each ten rounds and five synchronizations; a loss of one less the accuracy."""
    points = [
        Point(10 * n, 5 * n, accuracy, round(1 - accuracy, 3), 0.9, 0.3, 100.0 * n, 500 * n + seed)
        for n, accuracy in enumerate(accuracies, start=1)
    ]
    values = {"label": "One", "seed": seed, "result": "ok", "seconds": 2.0, "config": CONFIG}
    return CondensedRun({**values, **about}, points)


RUNS = [run_of(1, [0.2, 0.5, 0.4, 0.6]), run_of(2, [0.3, 0.3, 0.6, 0.5])]


def test_what_was_reached() -> None:
    found = standing(RUNS)
    # Rounds 30 and 40: means 0.5 and 0.55, whose deviation is 0.05 / sqrt 2.
    assert found["worst_accuracy"]["second_half"] == pytest.approx(
        {"mean": 0.525, "deviation": 0.05 / 2**0.5}, abs=1e-12
    )
    assert found["worst_accuracy"]["last"]["mean"] == pytest.approx(0.55)
    assert found["worst_accuracy"]["best"] == pytest.approx({"mean": 0.6, "deviation": 0})
    # (0.4, 0.6) and (0.6, 0.5) lie 0.1 and 0.05 about their means.
    assert found["worst_accuracy"]["within_run"] == pytest.approx(0.075)
    assert found["max_loss"]["best"] == pytest.approx({"mean": 0.4, "deviation": 0})
    assert found["total"] == {
        "round": 40,
        "synchronization": 20,
        "float_equivalents": 400,
        "wire_bytes": 2001.5,
    }
    assert (found["seeds"], found["whole"], found["seconds"]) == (2, 2, 2.0)


def test_targets() -> None:
    rows = to_targets(RUNS, Targets(worst_accuracy=[0.5, 0.7], max_loss=[0.5]))
    first, never, loss = rows
    assert (first["reached"], first["seeds"]) == (2, 2)
    # At rounds 20 and 30.
    assert first["round"] == pytest.approx({"mean": 25, "deviation": 50**0.5})
    assert first["synchronization"]["mean"] == 12.5
    assert first["wire_bytes"]["mean"] == (1001 + 1502) / 2
    assert never["reached"] == 0
    assert never["round"] is None
    assert loss["round"]["mean"] == 25
    assert reached(RUNS[0], "max_loss", 0.8) == RUNS[0].points[0]
    assert Spread.of([3.0]) == Spread(3.0, 0.0)


def test_a_curve_is_the_mean_over_seeds() -> None:
    curve = curve_of(RUNS, "wire_bytes", "worst_accuracy")
    assert curve["x"].tolist() == [501.5, 1001.5, 1501.5, 2001.5]
    assert curve["mean"] == pytest.approx([0.25, 0.4, 0.5, 0.55])
    assert curve["deviation"] == pytest.approx(np.array([0.1, 0.2, 0.2, 0.1]) / 2**0.5)
    cut = run_of(3, [0.9], result="diverged")
    assert curve_of([*RUNS, cut], "round", "worst_accuracy")["mean"] == pytest.approx(curve["mean"])
    assert curve_of([cut], "round", "worst_accuracy")["mean"] == pytest.approx([0.9])


def test_the_tables_in_markdown() -> None:
    targets = Targets(worst_accuracy=[0.5, 0.7])
    runs = [*RUNS, run_of(3, [0.1], result="diverged")]
    table = {"one": {"label": "One", **standing(runs), "targets": to_targets(runs, targets)}}
    text = markdown(table)
    assert "| One (1 diverged) |" in text
    assert "| worst accuracy ≥ 0.5 | One | 2/3 | 25 ± 7 | 12 ± 4 | 0 ± 0 | 0 ± 0 |" in text
    assert "| worst accuracy ≥ 0.7 | One | 0/3 | - | - | - | - |" in text
    widths = [len(re.findall(r"\|", line)) for line in text.splitlines() if line]
    assert widths == [9, 9, 9, 8, 8, 8, 8]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "experiment.yaml").write_text(
        """
title: Small
methods:
  one: {label: One, config: one.yaml}
  other: {label: Other, config: one.yaml}
parts:
  m-2: {title: Two, seeds: [1, 2], series: Growth, targets: {worst_accuracy: [0.5], max_loss: [0.5]}}
  m-4: {title: Four, seeds: [1, 2], series: Growth, targets: {worst_accuracy: [0.5], max_loss: [0.5]}}
  later: {title: Later, seeds: [1]}
"""
    )
    return folder


def write_runs(results: Path) -> None:
    for part, workers in (("m-2", 2), ("m-4", 4)):
        for name in ("one", "other"):
            for run in RUNS:
                about = {**run.about, "part": part, "run": name, "config": {**CONFIG, "workers": workers}}
                path = run_file(results, part, name, about["seed"])
                CondensedRun(about, run.points).write(path)


def draw_apart(experiment: Path, *results: Path) -> None:
    """In a process of its own, since matplotlib keeps its fonts' files open; without PyTorch."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from afl_reproduction.__main__ import main\n"
        f"for results in {[str(folder) for folder in results]!r}:\n"
        f"    assert main([{str(experiment)!r}, '--results', results, '--draw']) == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.long
def test_figures_and_tables_of_what_is_stored(experiment: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folders = [tmp_path / "results", tmp_path / "again"]
    for folder in folders:
        write_runs(folder / "small")
    draw_apart(experiment, *folders)
    results, again = (
        {path.name: path.read_bytes() for path in (folder / "small").iterdir() if path.is_file()}
        for folder in folders
    )
    assert results.keys() == {
        *(f"{part}.{form}" for part in ("m-2", "m-4") for form in ("json", "md")),
        *(
            f"{name}-{measure}.{form}"
            for name in ("m-2", "m-4", "growth")
            for measure in ("worst-accuracy", "max-loss")
            for form in ("png", "svg")
        ),
    }
    table = json.loads(results["m-4.json"])
    assert table["other"]["targets"][0]["round"]["mean"] == 25
    assert results["growth-max-loss.png"].startswith(b"\x89PNG")
    assert again == results


def test_a_small_file_keeps_a_run(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.jsonl"
    RUNS[0].write(path)
    again = read_run(path)
    assert again == RUNS[0]
    assert again.config.workers == 2
    path.write_text('{"seed": 1}\n{"round": 3}\n')
    with pytest.raises(ConfigError, match=r"run\.jsonl is no condensed run"):
        read_run(path)
