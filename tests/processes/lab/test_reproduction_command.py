"""``python -m afl_reproduction`` from its search to its small files, on digits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from afl.errors import ExitCode
from afl_reproduction import command as reproduction
from afl_reproduction import drawing
from afl_reproduction.__main__ import main

EXPERIMENT = """
title: Digits
methods:
  afl-br: {label: AFL-BR, config: afl-br.yaml}
  fedavg: {label: FedAvg, config: fedavg.yaml}
parts:
  main:
    title: Both
    seeds: [1, 2]
    search:
      seed: 9
      rounds: 12
      every: 3
      grids:
        afl-br: {eta_w: [0.001, 0.2], eta_q: [0.1]}
        fedavg: {eta_w: [0.001, 0.2]}
    targets: {worst_accuracy: [0.01]}
  blocks:
    title: Blocks
    seeds: [1]
    steps: main
    variants:
      as-main: {method: afl-br, label: Same}
      b-2: {method: afl-br, label: B = 2, set: [algorithm.block=2]}
"""

CONFIG = """
workers: 10
task: {name: digits, batch_size: 16, options: {data_seed: 0, hidden: [32]}}
algorithm: {name: NAME, rounds: 12, eta_w: 0.1}
evaluation: {every: 3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "experiment.yaml").write_text(EXPERIMENT)
    (folder / "afl-br.yaml").write_text(CONFIG.replace("NAME", "afl-br, eta_q: 0.1"))
    (folder / "fedavg.yaml").write_text(CONFIG.replace("NAME", "fedavg, local_steps: 3"))
    return folder


@pytest.mark.slow
def test_from_search_to_small_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results" / "tiny"
    command = [
        str(folder), "--results", str(tmp_path / "results"), "--out", str(tmp_path / "out"),
        "--jobs", "1",
    ]  # fmt: skip
    assert main([*command, "--parts", "none"]) == ExitCode.CONFIG
    assert "no part none; tiny has main, blocks" in capsys.readouterr().err
    # A process of its own: what runs in parallel leaves helpers, and matplotlib its fonts' files, to its end.
    subprocess.run([sys.executable, "-m", "afl_reproduction", *command], check=True)

    trials = [json.loads(line) for line in (results / "search.jsonl").read_text().splitlines()]
    assert len(trials) == 4
    assert {trial["config"]["task"]["options"]["evaluate_on"] for trial in trials} == {"validation"}
    scores = {(trial["method"], trial["steps"]["eta_w"]): trial["score"] for trial in trials}
    for method in ("afl-br", "fedavg"):
        assert scores[method, 0.2] > scores[method, 0.001]
    files = sorted(path.relative_to(results / "runs").as_posix() for path in results.rglob("runs/*/*.jsonl"))
    assert files == [
        "blocks/as-main-seed-1.jsonl",
        "blocks/b-2-seed-1.jsonl",
        *(f"main/{name}-seed-{seed}.jsonl" for name in ("afl-br", "fedavg") for seed in (1, 2)),
    ]
    about, *points = map(json.loads, (results / "runs/main/afl-br-seed-1.jsonl").read_text().splitlines())
    assert about["config"]["algorithm"]["eta_w"] == 0.2
    assert "evaluate_on" not in about["config"]["task"]["options"]
    assert [(point["round"], point["synchronization"]) for point in points] == [(n, n) for n in (3, 6, 9, 12)]
    assert json.loads((results / "main.json").read_text())["fedavg"]["seeds"] == 2
    assert (results / "blocks-worst-accuracy.svg").is_file()
    # The same configuration and seed as in the other part: not run again.
    assert not (tmp_path / "out/tiny/runs/blocks/as-main").exists()
    same, *its_points = map(
        json.loads, (results / "runs/blocks/as-main-seed-1.jsonl").read_text().splitlines()
    )
    assert (same["label"], its_points) == ("Same", points)

    monkeypatch.setattr(reproduction, "run_here", None)
    monkeypatch.setattr(drawing, "draw", lambda experiment, results: None)
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*.jsonl")}
    assert main(command) == ExitCode.OK
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*.jsonl")} == before
    assert "main: 0 of 4 trials to make\nmain: 0 of 4 runs to make" in capsys.readouterr().out
    assert main([*command, "--set", "algorithm.rounds=9"]) == ExitCode.CONFIG
    assert "holds a run of another configuration" in capsys.readouterr().err
    assert main([*command, "--set", "task.batch_size=8"]) == ExitCode.CONFIG
    assert "under another configuration" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "more"), [("--results", []), ("--out", []), ("--results", ["--draw"])])
def test_a_file_in_a_folder_s_place_is_told_before_any_work(
    option: str,
    more: list[str],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reproduction, "run_here", None)
    file = tmp_path / "file"
    file.touch()
    folders = {"--results": str(tmp_path / "results"), "--out": str(tmp_path / "out")} | {option: str(file)}
    command = [str(folder), *(word for pair in folders.items() for word in pair), *more]
    assert main(command) == ExitCode.CONFIG
    said = capsys.readouterr()
    assert f"{option}: {file} is a file, where a folder is needed; name another folder" in said.err
    assert said.out == ""


def test_a_search_is_needed_first(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(folder), "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*command, "--parts", "blocks"]) == ExitCode.CONFIG
    assert "no trial of afl-br in main has ended well" in capsys.readouterr().err
