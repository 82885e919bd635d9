"""``python -m afl_benchmarks.over_links`` on a small task: a few rounds over each kind of link."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from afl_benchmarks.links.namespaces import NamespaceLinks, UnavailableError
from afl_benchmarks.links.pipe import Link
from afl_benchmarks.links.results import read_runs
from afl_benchmarks.over_links import last_evaluation, main

WORKERS, ROUNDS, DIM = 2, 4, 650

EXPERIMENT = {
    "title": "Digits, two workers",
    "methods": {"rand-k": {"label": "AFL-Com(R)", "config": "rand-k.yaml"}},
    "parts": {"main": {"title": "One method", "seeds": [1]}},
}

CONFIG = {
    "workers": WORKERS,
    "task": {"name": "digits", "batch_size": 16, "options": {"hidden": []}},
    "algorithm": {
        "name": "afl-com",
        "rounds": 50,
        "eta_w": 0.1,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.1},
    },
    "evaluation": {"every": 2},
}

KINDS = {
    "none": ["--mbit", "0"],
    "proxy": ["--links", "proxy", "--mbit", "20", "--round-trip", "10ms"],
    "namespaces": ["--links", "namespaces", "--mbit", "20", "--round-trip", "0s"],
}


def kinds_here(*, whole: bool) -> list[str]:
    """A kernel that makes links of a rate, but knows no delay, is enough; the slow tier has all kinds."""
    if not whole:
        return ["none", "proxy"]
    probe = NamespaceLinks(1, Link(rate=1e6, delay=0.0))
    try:
        probe.make()
    except UnavailableError:
        return [kind for kind in KINDS if kind != "namespaces"]
    probe.close()
    return list(KINDS)


def written(folder: Path) -> Path:
    """The experiment's folder."""
    experiment = folder / "small"
    experiment.mkdir()
    (experiment / "experiment.yaml").write_text(yaml.safe_dump(EXPERIMENT), encoding="utf-8")
    (experiment / "rand-k.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    return experiment


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_a_method_over_links_is_the_same_to_the_bit_and_all_that_passes_is_counted(
    whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = written(tmp_path)
    out = tmp_path / "links.jsonl"
    kinds = kinds_here(whole=whole)
    for kind in kinds:
        run = ["--experiment", str(experiment), "--methods", "rand-k", "--rounds", str(ROUNDS)]
        assert main([*run, *KINDS[kind], "--targets", "2", "--out", str(out)]) == 0, capsys.readouterr()
    runs = {run.links: run for run in read_runs(out)}
    assert list(runs) == kinds
    first = runs["none"]
    assert [point.round for point in first.points] == [2, 4]
    for run in runs.values():
        assert run.path == first.path
        assert [point.worst_accuracy for point in run.points] == [
            point.worst_accuracy for point in first.points
        ]
        assert 0 <= run.points[0].seconds <= run.points[1].seconds
        assert run.points[1].up > ROUNDS * WORKERS * 4 * DIM // 10
        if run.links != "none":
            # HTTP/2's own frames, and for namespaces the packets' headers, come on top.
            assert run.messages_up < run.carried_up < 3 * run.messages_up
            assert run.messages_down < run.carried_down < 3 * run.messages_down

    capsys.readouterr()
    assert main(["--table", str(out), "--targets", "0.0", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| AFL-Com(R) | loopback | 2 |") == 1
    assert "≥ 2 " not in shown, "no run reaches it"
    assert "| AFL-Com(R) | 20 Mbit/s, 10 ms | 2 |" in shown


@pytest.mark.parametrize(
    ("wanted", "rounds", "every", "last"),
    [
        (1000, 50, 20, 50),
        (50, 50, 20, 50),
        (49, 50, 20, 40),
        (5, 50, 20, 20),
        (5, 10, 20, 10),
        (30, 10, 20, 10),
    ],
)
def test_a_run_ends_with_an_evaluation_that_there_is(wanted: int, rounds: int, every: int, last: int) -> None:
    assert last_evaluation(wanted, rounds, every) == last


@pytest.mark.long
def test_evaluations_that_are_rarer_than_the_run_is_long_do_not_hold_it_up(tmp_path: Path) -> None:
    experiment = written(tmp_path)
    out = tmp_path / "links.jsonl"
    changes = ["--set", "algorithm.rounds=3", "--set", "evaluation.every=20"]
    command = ["--experiment", str(experiment), "--methods", "rand-k", "--mbit", "0", *changes]
    assert main([*command, "--targets", "2", "--out", str(out)]) == 0
    (run,) = read_runs(out)
    assert [point.round for point in run.points] == [3]


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--methods", "no-such"]) == 1
    assert "no method no-such; there is afl-br" in capsys.readouterr().err
    broken = tmp_path / "links.jsonl"
    broken.write_text('{"method": "AFL-BR"}\n', encoding="utf-8")
    assert main(["--table", str(broken)]) == 1
    assert "links.jsonl:1 is no run over links" in capsys.readouterr().err
