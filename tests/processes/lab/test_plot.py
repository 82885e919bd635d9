"""``afl plot`` on real simulated runs, and on directories in every state."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import font_manager, mathtext

from afl.config import config_from_mapping
from afl.config.quantities import shown_bytes
from afl.errors import ConfigError
from afl.terminal import view
from afl_cli.main import main
from afl_lab.plots.comparison import labels_of, metrics_file
from afl_lab.plots.points import points_of
from afl_lab.simulation.run import simulate

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "digits"},
    "algorithm": {"name": "afl-br", "rounds": 8, "eta_w": 0.1, "eta_q": 0.1},
    "evaluation": {"every": 2},
    "run": {"seed": 1},
}


@pytest.fixture(autouse=True, scope="module")
def fonts_closed() -> Iterator[None]:
    """matplotlib keeps its fonts' files open."""
    yield
    mathtext.MathTextParser._parse_cached.cache_clear()
    font_manager._get_font.cache_clear()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``br`` of 8 rounds, ``drfa`` of 4 in synchronizations of 2, ``plain`` without accuracies."""
    folder = tmp_path_factory.mktemp("runs")
    drfa = {"name": "drfa", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1, "local_steps": 2}
    simulate(config_from_mapping(CONFIG), folder / "br", saves_models=False)
    simulate(config_from_mapping({**CONFIG, "algorithm": drfa}), folder / "drfa", saves_models=False)
    simulate(
        config_from_mapping({**CONFIG, "task": {"name": "synthetic"}}),
        folder / "plain",
        saves_models=False,
    )
    return folder


def plot(*arguments: str | Path) -> int:
    return main(["plot", *map(str, arguments)])


def test_runs_are_drawn_by_the_names_of_their_directories(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures"
    assert plot(runs / "br", runs / "drfa" / "metrics.jsonl", "--out", out, "--title", "Two runs") == 0
    assert {path.name for path in out.iterdir()} == {
        f"{measure}.{form}" for measure in ("worst-accuracy", "max-loss") for form in ("png", "svg")
    }
    assert (out / "max-loss.png").read_bytes().startswith(b"\x89PNG")
    texts = re.findall(r"<text[^>]*>([^<]+)</text>", (out / "worst-accuracy.svg").read_text("utf-8"))
    for expected in (
        "Two runs",
        "br",
        "drfa",
        "update rounds",
        "synchronization rounds",
        "float equivalents sent",
        "bytes on the wire",
    ):
        assert expected in texts
    shown = capsys.readouterr().out
    best = max(point.worst_accuracy for point in points_of(runs / "br") if point.worst_accuracy is not None)
    assert f"{best:.4f}" in shown
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert plot(runs / "br", runs / "drfa", "--out", out, "--title", "Two runs") == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before, "the same runs, other files"


def test_points_are_the_evaluations_with_what_was_sent(runs: Path) -> None:
    lines = [json.loads(line) for line in (runs / "drfa" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    points = points_of(runs / "drfa")
    assert [(point.round, point.synchronization) for point in points] == [(2, 1), (4, 2)]
    for point, line in zip(points, evaluations, strict=True):
        assert point.worst_accuracy == line["worst_accuracy"]
        assert point.wire_bytes == line["uplink_bytes"] + line["downlink_bytes"]


def test_a_run_that_goes_on_is_drawn_as_far_as_it_is(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last line is half there; some rounds stand twice, since its server was started again."""
    lines = (runs / "br" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    going = tmp_path / "going"
    going.mkdir()
    (going / "metrics.jsonl").write_text("".join([*lines[:6], *lines[3:8], lines[8][:20]]), encoding="utf-8")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    assert plot(going, runs / "br", tmp_path / "new", "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert "going (unfinished)" in shown
    assert "new: no evaluation yet, so it is left out" in shown
    assert [point.round for point in points_of(going)] == [2, 4]
    assert points_of(going) == points_of(runs / "br")[:2]


def test_the_table_is_whole_at_eighty_columns(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "NARROWEST", 80)
    monkeypatch.setenv("COLUMNS", "80")
    label = "a name that is as long as a line of eighty columns cannot hold it beside all the others"
    assert plot(runs / "br", runs / "plain", "--label", label, "--label", "plain", "--out", tmp_path) == 0
    table = capsys.readouterr().out.partition("written")[0]
    assert "…" not in table
    heads = "run update rounds syncs best worst accuracy least loss float equivalents sent"
    assert set(heads.split()) <= set(re.findall(r"\w+", table))
    assert shown_bytes(points_of(runs / "br")[-1].wire_bytes) in table
    capsys.readouterr()
    assert plot(runs / "plain", "--out", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "accuracy" not in shown
    assert f"{min(point.max_loss for point in points_of(runs / 'plain')):.5g}" in shown


def test_the_metric_that_ranks_is_drawn_and_listed_too(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    with (tmp_path / "own" / "metrics.jsonl").open("w") as file:
        for text in (runs / "plain" / "metrics.jsonl").read_text().splitlines():
            line = json.loads(text)
            by = {
                "rank_by": "top_5",
                "better": "lower",
                "worst_value": 0.5 + line["round"],
                "mean_value": 1.0,
            }
            file.write(json.dumps(line | (by if line["event"] == "evaluation" else {})) + "\n")
    out = tmp_path / "plots"
    assert plot(runs / "br", tmp_path / "own", "--out", out) == 0
    shown = capsys.readouterr().out
    assert "2.5000" not in shown
    assert "2.5" in shown, "the lowest of the second to the eighth round"
    for measure in ("worst-accuracy", "worst-top-5", "max-loss"):
        assert (out / f"{measure}.svg").exists()
    assert "worst worker's top_5" in (out / "worst-top-5.svg").read_text("utf-8").replace("&#x27;", "'")


def test_a_task_without_accuracy_has_its_loss_drawn(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(runs / "plain", "--out", tmp_path, "--label", "Losses") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["max-loss.png", "max-loss.svg"]
    assert "Losses" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such file or directory"),
        (["."], r"\.: holds no run \(no metrics.jsonl\); runs are in br, drfa, plain"),
        (["br/config.yaml"], "br/config.yaml: not a run directory, and not a run's metrics.jsonl; name one"),
        (["br", "br"], "a run is named twice: br/metrics.jsonl and br/metrics.jsonl; name each once"),
        (["br", "drfa", "--label", "One"], "--label: 1 given for 2 runs"),
        (["br", "drfa", "--label", "One", "--label", "One"], "two runs have the same label"),
    ],
)
def test_what_is_no_run_is_named(
    arguments: list[str],
    message: str,
    runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    assert plot(*arguments) == 2
    assert re.search(message, capsys.readouterr().err)


def test_nothing_to_draw_and_damage_are_told(
    tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    assert plot(tmp_path, "--out", tmp_path / "out") == 2
    assert "nothing to draw: no evaluation yet" in capsys.readouterr().err
    metrics.write_text("not JSON\n" + (runs / "br" / "metrics.jsonl").read_text())
    assert plot(tmp_path, "--out", tmp_path / "out") == 7
    assert "metrics.jsonl:1: not JSON, or damaged" in capsys.readouterr().err
    metrics.write_text('{"event": "evaluation", "round": 3}\n')
    assert plot(tmp_path, "--out", tmp_path / "out") == 7
    assert "lacks 'mean_accuracy'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert plot(runs / "br", "--out", out) == 9
    said = f"--out {out} cannot be written: it is a file, and must be a folder; name another folder"
    assert capsys.readouterr().err == f"afl plot: {said}\n"


def test_labels_grow_until_they_differ(tmp_path: Path) -> None:
    files = [tmp_path / config / "seed-1" / "metrics.jsonl" for config in ("br", "com")]
    assert labels_of(files) == ["br/seed-1", "com/seed-1"]
    with pytest.raises(ConfigError, match="no such file"):
        metrics_file(tmp_path / "nowhere")


def test_matplotlib_is_asked_for(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot(runs / "br", "--out", tmp_path / "plots") == 2
    assert not (tmp_path / "plots").exists()
    assert "the package matplotlib is needed to draw: pip install 'afl[lab]'" in capsys.readouterr().err
