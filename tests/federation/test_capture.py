"""What workers of real federations have sent, as ``afl capture`` sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from afl_cli.main import main
from support import Federation
from support.federation import needed_options

RAND_K = {"name": "rand-k", "ratio": 0.2, "bits": 16}


def config_of(privacy: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "workers": 3,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 500, **options}},
        "algorithm": {"name": "afl-com", "rounds": 40, "eta_w": 0.5, "eta_q": 0.3, "uplink": RAND_K},
        "evaluation": {"every": 20},
        "privacy": privacy,
    }


def captures(config: dict[str, Any], folder: Path, groups: tuple[str, ...] = ("0", "1", "2")) -> list[Path]:
    """What each process of a whole run has sent."""
    files = [folder / f"sent-{ids}" for ids in groups]
    with Federation(config, folder) as federation:
        for ids, file in zip(groups, files, strict=True):
            federation.start(ids, *needed_options(config), "--capture", str(file))
        federation.finish()
    counts = federation.summary()["communication"]["uplink"]
    # All that has come over the wire was captured; signs of life may be on their way at the end.
    assert 0 <= sum(file.stat().st_size for file in files) - counts["wire_bytes"] < 500
    return files


def checked(file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    code = main(["capture", str(file), "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_a_masked_run_passes_at_every_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in captures(config_of({"secure_aggregation": True}), tmp_path / "run"):
        code, found, err = checked(file, capsys)
        assert (code, err) == (0, "")
        assert found["masked"] == [{"role": "UPDATE", "bits": 16, "payloads": 40, "bytes": 40 * 2 * 101}]
        assert {name for name in found["in_clear"] if "metrics" in name} == {
            "reports.metrics.name",
            "reports.metrics.value",
        }


def test_of_a_run_with_hidden_losses_only_names_and_numbers_of_messages_are_in_clear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of({"secure_aggregation": True, "losses": "hidden"})
    for file in captures(config, tmp_path / "run"):
        code, found, err = checked(file, capsys, "--losses", "hidden")
        assert (code, err) == (0, "")
        assert [(each["role"], each["payloads"]) for each in found["masked"]] == [
            ("UPDATE", 40),
            ("WEIGHT", 40),
            ("METRICS", 2),
        ]
        told = {name for name in found["in_clear"] if name.startswith("reports.")}
        of_payloads = {name for name in told if name.startswith("reports.payloads.")}
        assert told - of_payloads <= {
            *("reports.worker", "reports.position.round", "reports.position.phase", "reports.examples"),
            *("reports.metrics.name", "reports.model_digest"),
        }


def test_an_unmasked_run_of_integers_fails_and_it_is_said_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, *_ = captures(config_of({}), tmp_path / "run")
    code, found, err = checked(file, capsys)
    assert code == 7
    assert found["masked"] == []
    assert "UPDATE payloads are of type INTEGER, which can be read" in err


def test_two_runs_of_different_data_cannot_be_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, *_ = captures(config_of({"secure_aggregation": True}), tmp_path / "one")
    two, *_ = captures(config_of({"secure_aggregation": True}, noise_w=0.7), tmp_path / "two")
    code, found, _ = checked(one, capsys, "--against", str(two))
    assert code == 0
    assert sum("against the other" in test["test"] for test in found["tests"]) == 3
    losses = [checked(file, capsys)[1]["in_clear"]["reports.loss"]["values"][0] for file in (one, two)]
    assert losses[0] != losses[1]


def test_workers_of_one_process_send_one_masked_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *_ = captures(config_of({"secure_aggregation": True}), tmp_path / "run", ("0,1", "2"))
    code, found, _ = checked(first, capsys)
    assert code == 0
    assert found["masked"][0]["payloads"] == 40


def test_a_process_that_is_killed_adds_to_its_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of({"secure_aggregation": True})
    config["task"] = {"name": "tests_tasks:Slow", "batch_size": 8, "options": {"pause": 0.03}}
    file = tmp_path / "sent"
    options = (*needed_options(config), "--capture", str(file))
    with Federation(config, tmp_path / "run") as federation:
        first, *_ = (federation.start(ids, *(options if ids == "0" else options[:-2])) for ids in "012")
        federation.wait_until(lambda status: status["round"] > 5)
        first.kill()
        federation.start("0", *options)
        federation.finish()
    code, found, err = checked(file, capsys)
    assert (code, err) == (0, "")
    assert found["in_clear"]["join.protocol"]["times"] == 2
    assert found["masked"][0]["payloads"] == 40
