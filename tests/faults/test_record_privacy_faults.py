"""Private steps and evaluations under faults: none is drawn without being counted, and none is forgotten."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from afl.core.record_privacy import RecordPrivacy, epsilon_of_tests
from afl.site.audit import read_log
from support import Federation

POLICY = "epsilon: 900.0\ndelta: 1.0e-5\naudit: audit-{}.jsonl\nmin_batch: 8\n"


def config(rounds: int, **changes: Any) -> dict[str, Any]:
    return {
        "workers": 2,
        "task": {"name": "digits", "batch_size": 16},
        "algorithm": {
            "name": "afl-com",
            "rounds": rounds,
            "eta_w": 0.1,
            "eta_q": 0.1,
            "uplink": {"name": "rand-k", "ratio": 0.5},
        },
        "evaluation": {"every": 1000},
        "privacy": {"records": {"noise": 5.0, "delta": 1e-5}},
        "worker": {"journal": "machine"},
        **changes,
    }


def trained(log: Path) -> list[dict[str, Any]]:
    return [dict(link.entry) for link in read_log(log) if link.entry["kind"] == "train"]


def start(federation: Federation, worker: str, *options: str, **environment: str) -> Any:
    (federation.folder / f"site-{worker}.yaml").write_text(POLICY.format(worker))
    return federation.start(worker, "--policy", f"site-{worker}.yaml", *options, environment=environment)


def check_counted(log: Path) -> list[int]:
    """That each message which left the site was counted before, and costs nothing when it is sent again;
    returns the rounds of different messages."""
    seen: dict[str, float] = {}
    rounds, spent = [], 0.0
    for entry in trained(log):
        if entry["digest"] not in seen:
            assert entry["epsilon"] > spent, entry
            seen[entry["digest"]] = spent = entry["epsilon"]
            rounds.append(entry["round"])
        assert entry["epsilon"] == spent
    return rounds


def test_a_server_that_is_put_back_is_answered_anew_and_each_answer_counts(tmp_path: Path) -> None:
    rounds = 120
    with Federation(config(rounds), tmp_path) as federation:
        listen = ("--set", f"server.listen={federation.address}")
        start(federation, "0")
        second = start(federation, "1")
        federation.wait_until(lambda status: status["round"] >= 20)
        federation.server.kill()
        shutil.copytree(federation.directory, tmp_path / "older")
        federation.start_server(*listen)
        federation.wait_until(lambda status: status["round"] >= 50)
        federation.server.kill()
        second.kill()
        shutil.rmtree(federation.directory)
        shutil.copytree(tmp_path / "older", federation.directory)
        federation.start_server(*listen)
        # The first worker has lived through it; the second comes back from its journal.
        start(federation, "1")
        federation.finish()
    for worker in "01":
        answered = check_counted(tmp_path / f"audit-{worker}.jsonl")
        assert set(answered) == set(range(1, rounds + 1))
        twice = len(answered) - rounds
        assert 20 <= twice <= 40, answered


@pytest.mark.long
def test_a_late_private_report_and_a_quarantine_leave_the_count_right(tmp_path: Path) -> None:
    # Long enough for the server to look at the quarantine twice, on a fast machine too.
    rounds, slow = 400, ("--task", "tests_tasks:Slow")
    stragglers = {"policy": "skip", "quorum": 0.5, "deadline": "2s"}
    changed = config(
        rounds, task={"name": "tests_tasks:Slow", "batch_size": 16}, faults={"stragglers": stragglers}
    )
    with Federation(changed, tmp_path) as federation:
        start(federation, "0", *slow)
        # It has drawn and not told for longer than the server waits.
        late = start(federation, "1", *slow, AFL_FAULT_POINTS="worker.after-journal:5:delay=5")
        late.wait_for("put_back")
        file = federation.directory / "quarantine"
        file.write_text("1\n", encoding="utf-8")
        federation.server.wait_for("quarantined", workers="[1]")
        before = federation.status()["round"]
        federation.wait_until(lambda status: status["round"] >= before + 3)
        file.unlink()
        federation.server.wait_for("quarantined", workers="[]")
        federation.finish()
    answered = check_counted(tmp_path / "audit-1.jsonl")
    assert len(answered) == len(set(answered)) < rounds
    assert answered[-1] == rounds, "it is back"
    assert len(check_counted(tmp_path / "audit-0.jsonl")) == rounds


def test_an_evaluation_with_noise_is_sent_again_as_it_was_and_counted(tmp_path: Path) -> None:
    records = {"noise": 5.0, "delta": 1e-5, "metrics": "noised", "metric_noise": 4.0}
    changed = config(12, privacy={"records": records}, evaluation={"every": 4})
    with Federation(changed, tmp_path) as federation:
        federation.start("0")
        # Entries are four rounds' and an evaluation's: killed before the evaluation is kept, then after.
        for point in ("before-journal:5", "after-journal:1"):
            environment = {"AFL_FAULT_POINTS": f"worker.{point}:kill"}
            federation.start("1", environment=environment).expect(-9)
        federation.start("1")
        federation.finish()
        evaluations = federation.records("evaluation")
    asked = RecordPrivacy(1.0, 5.0, 1e-5, noise=5.0, metric_noise=4.0)
    for count, evaluation in enumerate(evaluations, 1):
        for told in evaluation["workers"]:
            assert told["privacy_tests_epsilon"] == epsilon_of_tests(asked, count)
            assert 0.0 <= told["accuracy"] <= 1.0
    assert "noise 4" in federation.summary()["record_privacy"]
