"""``afl theory``, as a person and as a program read it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from afl_cli.main import main
from afl_cli.theory import number

ROOT = Path(__file__).resolve().parents[3]

SIZE = ["--workers", "10", "--rounds", "10000"]

PROBLEM = ["--smoothness=2", "--sigma-q=0.25"]


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["theory", *arguments, "--json"]) == ExitCode.OK
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a person sees, with its line breaks and columns as single spaces."""
    assert main(["theory", *arguments]) == ExitCode.OK
    return " ".join(capsys.readouterr().out.split())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["theory", *arguments]) == ExitCode.CONFIG
    return capsys.readouterr().err


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(
        "workers: 10\n"
        "task: {name: synthetic, options: {dim: 60}}\n"
        "algorithm: {name: afl-com, rounds: 10000, eta_w: theory, smoothness: 2, eta_q: theory,\n"
        "  sigma_q: 0.25, uplink: {name: rand-k, ratio: 0.5}}\n"
    )
    return path


def test_step_sizes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, *SIZE, "--smoothness=2", "--sigma-q=0.5")
    assert answer["step_sizes"] == {
        "block": 100,
        "eta_w": pytest.approx(6.25e-5, rel=1e-14),
        "eta_q": pytest.approx(0.6069708517540585, rel=1e-14),
    }
    assert answer["covered"]
    assert answer["warnings"] == []


@pytest.mark.parametrize(
    ("compressor", "delta", "keeps_rate"),
    [
        (["--compressor=rand-k", "--ratio=0.1"], 0.1, 0.65901),
        (["--compressor=top-k", "--ratio=0.1"], 0.1, 0.81179),
        (["--compressor=identity"], 1.0, 1.0),
        # 0.659 and 0.812 of 1000, rounded.
        (["--compressor=rand-k", "--ratio=theory"], 0.659, 0.65901),
        (["--compressor=top-k", "--ratio=theory"], 0.812, 0.81179),
    ],
)
def test_the_compressor_chooses_the_ratio_that_keeps_the_rate(
    compressor: list[str], delta: float, keeps_rate: float, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = asked(capsys, *SIZE, *PROBLEM, "--dim=1000", *compressor)
    assert answer["compression"]["delta"] == pytest.approx(delta)
    assert answer["compression"]["ratio_that_keeps_the_rate"] == pytest.approx(keeps_rate, abs=5e-6)
    assert [row["k"] for row in answer["ratios"]] == [812, 659]


def test_a_compressor_below_the_ratio_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, *SIZE, "--dim=1000", "--compressor=rand-k", "--ratio=0.1")
    assert "This run: rand-k (ratio 0.1) both ways, delta = 0.1. That is below 0.659" in text
    text = shown(capsys, *SIZE, "--dim=1000", "--compressor=rand-k", "--ratio=0.7")
    assert "delta = 0.7." in text
    assert "That is below" not in text


def test_what_the_theorems_do_not_cover(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--workers=1", "--rounds=8", *PROBLEM)
    assert "do not cover m = 1 (at least 2) and T = 8 (at least 9)" in text
    assert "1 worker, 8 rounds" in text
    assert not asked(capsys, "--workers=2", "--rounds=8")["covered"]


def test_a_configuration_gives_the_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--config", str(config))
    assert (answer["workers"], answer["rounds"], answer["dim"], answer["warnings"]) == (10, 10_000, 60, [])
    assert answer["step_sizes"]["eta_w"] == pytest.approx(6.25e-5, rel=1e-14)
    assert answer["compression"]["delta"] == 0.5


def test_a_configuration_s_compressors_may_differ(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def compression(downlink: str) -> dict[str, Any]:
        answer = asked(capsys, "--config", str(config), "--set", f"algorithm.downlink={downlink}")
        found: dict[str, Any] = answer["compression"]
        return found

    mixed = compression("{name: top-k, ratio: 0.1}")
    assert (mixed["delta"], mixed["ratio_that_keeps_the_rate"]) == (0.1, pytest.approx(0.81179, abs=5e-6))
    assert mixed["description"] == "rand-k (ratio 0.5) up, top-k (ratio 0.1) down"
    # Nothing is lost on the way down: Theorem 3's proof asks for no more.
    exact = compression("{name: identity}")
    assert (exact["delta"], exact["ratio_that_keeps_the_rate"]) == (0.5, pytest.approx(0.65901, abs=5e-6))


def test_a_configuration_with_other_steps(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--set", "algorithm.optimizer.name=adam", "--set", "algorithm.clip_norm=1"]
    answer = asked(capsys, "--config", str(config), *own)
    assert any(
        "the configuration has optimizer and clip_norm: the theorems are" in w for w in answer["warnings"]
    )
    plain = asked(capsys, "--config", str(config), "--set", "algorithm.optimizer.name=sgd")
    assert not any("the configuration has" in warning for warning in plain["warnings"])


@pytest.mark.parametrize(
    ("dual", "eta_q", "said", "is_about_it"),
    [
        ("{name: kl-regularized, temperature: 0.5}", None, "FGDRO|Guo and Yang .2024. prove", False),
        ("{name: fixed-share, uniform: 0.1}", 0.1, "uniform 0.1.: Herbster and Warmuth", False),
        ("{name: projected}", 0.1, "AFL .Mohri et al. 2019, convex losses.", False),
        ("{name: cvar, share: 0.2}", 0.1, "by our reading of their proofs", True),
    ],
)
def test_what_is_proven_of_another_dual_rule_is_said(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    dual: str,
    eta_q: float | None,
    said: str,
    is_about_it: bool,
) -> None:
    own = f"algorithm={{name: afl-br, rounds: 100, eta_w: 0.1, eta_q: {json.dumps(eta_q)}, dual: {dual}}}"
    first, *others = asked(capsys, "--config", str(config), "--set", own)["warnings"]
    assert first.startswith(f"the dual weights follow {dual[1:].split()[1].strip(',}')}")
    assert re.search(said, first)
    assert ("what follows is about kl-restarts" in first) is not is_about_it
    # Where the theorems hold by that reading, other step sizes are told too.
    assert any("the configuration sets eta_w = 0.1" in warning for warning in others) is is_about_it


def test_a_configuration_with_its_own_step_sizes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--set", "algorithm={name: afl-br, rounds: 100, block: 7, eta_w: 0.1, eta_q: theory, sigma_q: 1}"]
    text = shown(capsys, "--config", str(config), *own)
    assert "Warning: the configuration sets eta_w = 0.1, block = 7; the theorems hold for the values" in text
    assert "needs --smoothness" in text
    given = asked(capsys, "--config", str(config), *own, "--smoothness=2")
    assert given["step_sizes"]["eta_w"] == pytest.approx(1 / (16 * 100**0.75))


def test_the_server_s_example_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "--config", str(ROOT / "deploy" / "server.yaml"))
    assert answer["step_sizes"]["block"] == math.ceil(math.sqrt(answer["rounds"]))
    assert answer["dim"] == 235_914


def test_a_task_that_is_not_installed_leaves_the_size_open(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = ["--config", str(config), "--set", "task={name: my_task:MyTask}"]
    answer = asked(capsys, *elsewhere)
    assert answer["compression"] is None
    assert "my_task:MyTask is not an installed one" in answer["warnings"][0]
    assert asked(capsys, *elsewhere, "--dim=10")["compression"]["delta"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--workers is missing"),
        (["--workers=3"], "--rounds is missing"),
        ([*SIZE, "--ratio=0.1"], "--ratio needs --compressor"),
        ([*SIZE, "--compressor=rand-k", "--ratio=0.1"], "--compressor rand-k needs --dim"),
        ([*SIZE, "--dim=9", "--compressor=rand-k"], "nothing, and rand-k needs it"),
        ([*SIZE, "--dim=9", "--compressor=randk", "--ratio=1"], "did you mean 'rand-k'?"),
        ([*SIZE, "--set=workers=4"], "none is given: add --config"),
        (["--config=nowhere.yaml"], "no such file"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_nothing_is_said_twice(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = refused(capsys, "--config", str(config), "--rounds=10")
    assert "--rounds and --config both set it; use --set algorithm.rounds=" in both
    both = refused(capsys, "--config", str(config), "--smoothness=1")
    assert "--smoothness is also algorithm.smoothness" in both


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workers", "0"),
        ("--workers", "2.5"),
        ("--rounds", "many"),
        ("--smoothness", "0"),
        ("--smoothness", "nan"),
        ("--sigma-q", "-1"),
        ("--smoothness", "inf"),
        ("--ratio", "1.5"),
    ],
)
def test_a_value_out_of_bounds_is_shown(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["theory", *SIZE, f"{option}={value}"])
    assert end.value.code == ExitCode.CONFIG
    error = capsys.readouterr().err
    assert f"argument {option}: '{value}' is n" in error


def test_numbers_as_a_person_reads_them() -> None:
    assert [number(x) for x in (2000, 10**8, 0.5, 12345.678, 1.5e-5, 0.0, 3e9)] == [
        "2,000",
        "1e+08",
        "0.5",
        "1.235e+04",
        "1.5e-05",
        "0",
        "3e+09",
    ]


@pytest.mark.parametrize("compressor", ["{name: rand-k, ratio: 0.5, bits: 4}", "{bits: 4}"])
def test_of_integers_the_selection_has_a_delta_and_rounding_a_warning(
    capsys: pytest.CaptureFixture[str], config: Path, compressor: str
) -> None:
    exact, integers = (
        asked(capsys, "--config", str(config), "--set", f"algorithm.uplink={each}")
        for each in (compressor.replace(", bits: 4", "").replace("bits: 4", "name: identity"), compressor)
    )
    assert integers["compression"]["delta"] == exact["compression"]["delta"]
    assert "bits 4" in integers["compression"]["description"]
    (warning,) = integers["warnings"]
    assert "rounding errs by up to half a step" in warning
    assert exact["warnings"] == []


def test_what_records_cost_and_what_noise_does_to_steps(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    private = [
        f"--set={text}" for text in ("privacy.records={noise: 4.0, delta: 1e-5}", "worker.journal=machine")
    ]
    found = asked(capsys, "--config", str(config), *private, "--records", "500")["records"]
    assert found["epsilon"] > 10
    # d is 60, a minibatch 32.
    assert found["noise_norm"] == pytest.approx(4 * math.sqrt(60) / 32)
    assert found["loss_deviation"] == pytest.approx(6 * 5 / 32)
    sigma_q = math.hypot(0.25, found["loss_deviation"])
    assert found["eta_q"] == pytest.approx(2 * math.sqrt(math.log(10)) / (sigma_q * 10))
    assert found["tests_epsilon"] is None
    assert "What privacy.records costs epsilon" in shown(
        capsys, "--config", str(config), *private, "--records", "500"
    )
    noised = "--set=privacy.records.metrics=noised"
    tests = asked(capsys, "--config", str(config), *private, noised, "--records", "500")["records"]
    # Mironov's (2017) bound for noise 10; the accountant's is a little tighter.
    n = tests["evaluations"]
    bound = min(n * alpha / 200 + math.log(1e5) / (alpha - 1) for alpha in range(2, 200))
    assert 0.7 * bound < tests["tests_epsilon"] <= bound
    assert "Of a test record" in shown(capsys, "--config", str(config), *private, noised, "--records", "500")
    assert "give --records" in shown(capsys, "--config", str(config), *private)
    assert "fewer than task.batch_size" in refused(
        capsys, "--config", str(config), *private, "--records", "5"
    )
    assert "needs a configuration with privacy.records" in refused(
        capsys, "--config", str(config), "--records", "500"
    )
