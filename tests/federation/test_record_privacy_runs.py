"""Runs that protect each record: what is sent again, what is counted, and when a worker ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from afl.site.audit import read_log
from support import Federation

ROUNDS = 12

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "digits", "batch_size": 16},
    "algorithm": {
        "name": "afl-com",
        "rounds": ROUNDS,
        "eta_w": 0.1,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.5},
    },
    "evaluation": {"every": 4},
    "privacy": {"records": {"epsilon": 8.0, "delta": 1e-5}},
    "worker": {"journal": "machine"},
    "server": {"chunk_bytes": "4KiB"},
}


def config(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, **changes}


def trained(log: Path) -> list[dict[str, Any]]:
    return [dict(link.entry) for link in read_log(log) if link.entry["kind"] == "train"]


def test_a_worker_that_is_killed_sends_the_same_again_and_counts_it_once(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("epsilon: 8.0\ndelta: 1.0e-5\naudit: audit.jsonl\nmin_batch: 8\n")
    with Federation(CONFIG, tmp_path) as federation:
        federation.start("0")
        policy = ("--policy", "site.yaml")
        # In the midst of a report that is journalled and in the log, and before one that is not.
        for number, point in enumerate(("mid-chunk:2", "before-journal:2", "after-journal:2"), start=1):
            worker = federation.start("1", *policy, environment={"AFL_FAULT_POINTS": f"worker.{point}:kill"})
            worker.expect(-9)
            assert number == len(federation.workers) - 1
        last = federation.start("1", *policy)
        federation.wait_until(lambda status: status["round"] >= ROUNDS - 4)
        federation.finish()
        assert last.logged("journal_read")
        assert not last.logged("privacy_counted")
        assert federation.workers[0].logged("privacy_planned")[0]["epsilon"] <= 8.0
        spent = last.logged("privacy_spent")[-1]
    entries = trained(tmp_path / "audit.jsonl")
    fresh = [entry for entry in entries if not entry["again"]]
    again = [entry for entry in entries if entry["again"]]
    assert [entry["round"] for entry in fresh] == list(range(1, ROUNDS + 1))
    assert again, "the first death was after the report had been logged"
    for entry in again:
        (first,) = (one for one in fresh if one["round"] == entry["round"])
        assert (entry["digest"], entry["epsilon"], entry["told"]) == (
            first["digest"],
            first["epsilon"],
            first["told"],
        )
    epsilons = [entry["epsilon"] for entry in fresh]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == spent["epsilon"] <= 8.0
    assert epsilons[-1] > 7.9
    evaluations = federation.records("evaluation")
    for worker in evaluations[-1]["workers"]:
        assert 7.9 < worker["privacy_epsilon"] <= 8.0
    summary = federation.summary()
    assert "epsilon 8 at delta 1e-05" in summary["record_privacy"]
    assert summary["last"]["own_metrics"]["privacy_epsilon"]["largest"] <= 8.0


def test_a_worker_whose_journal_is_lost_counts_what_may_have_been_sent_and_ends_in_time(
    tmp_path: Path,
) -> None:
    with Federation(CONFIG, tmp_path) as federation:
        federation.start("0")
        worker = federation.start("1", environment={"AFL_FAULT_POINTS": "worker.before-apply:6:kill"})
        worker.expect(-9)
        for file in tmp_path.glob("afl-journal/*/worker-1.journal"):
            file.unlink()
        second = federation.start("1")
        second.expect(ExitCode.PRIVACY)
        (counted,) = second.logged("privacy_counted")
        assert counted["steps"] >= 5
        assert "worker 1 may spend an epsilon of 8 at delta 1e-05" in second.logged("ended")[0]["message"]
        (failed,) = federation.server.logged("worker_failed")
        assert "one more would cost too much" in failed["message"]
        assert federation.server.is_running, "it waits for the worker, as configured"


@pytest.mark.parametrize("spoil", ["older", "damaged"])
def test_a_journal_that_lacks_rounds_counts_them_as_spent(tmp_path: Path, spoil: str) -> None:
    changed = config(
        algorithm={**CONFIG["algorithm"], "rounds": 400},
        privacy={"records": {"noise": 30.0, "delta": 1e-5}},
        evaluation={"every": 400},
    )
    with Federation(changed, tmp_path) as federation:
        federation.start("0")
        worker = federation.start("1", environment={"AFL_FAULT_POINTS": "worker.before-apply:4:kill"})
        worker.expect(-9)
        (journal,) = tmp_path.glob("afl-journal/*/worker-1.journal")
        older = journal.read_bytes()
        first = federation.status()["round"]
        worker = federation.start("1", environment={"AFL_FAULT_POINTS": "worker.before-apply:20:kill"})
        worker.expect(-9)
        journal.write_bytes(older if spoil == "older" else bytes(range(256)) * (len(older) // 256))
        rounds = federation.status()["round"]
        last = federation.start("1")
        counted = last.wait_for("privacy_counted")["steps"]
        assert rounds - first >= 15
        # The status has the last round that is closed; of an older journal, the one before may be open.
        assert 0 <= counted - (rounds - first if spoil == "older" else rounds) <= 1


def test_a_worker_whose_records_have_changed_does_not_go_on(tmp_path: Path) -> None:
    changed = config(
        task={"name": "tests_tasks:Grown", "batch_size": 16},
        privacy={"records": {"noise": 30.0, "delta": 1e-5}},
    )
    task = ("--task", "tests_tasks:Grown")
    with Federation(changed, tmp_path) as federation:
        federation.start("0", *task)
        worker = federation.start("1", *task, environment={"AFL_FAULT_POINTS": "worker.before-apply:4:kill"})
        worker.expect(-9)
        last = federation.start("1", *task, environment={"GROWN": "64"})
        last.expect(ExitCode.CONFIG)
        assert "private steps with records 32 and now 64" in last.logged("ended")[0]["message"]


def test_a_site_that_allows_less_than_the_noise_costs_refuses_the_run(tmp_path: Path) -> None:
    changed = config(privacy={"records": {"noise": 1.0, "delta": 1e-5}})
    (tmp_path / "site.yaml").write_text("epsilon: 0.5\ndelta: 1.0e-5\nmin_batch: 8\n")
    with Federation(changed, tmp_path) as federation:
        worker = federation.start("1", "--policy", "site.yaml")
        worker.expect(ExitCode.POLICY)
        (ended,) = worker.logged("ended")
        assert "site.yaml:1: epsilon" in ended["message"]
        assert "the run's rounds cost worker 1" in ended["message"]


def test_the_pages_show_what_was_spent_under_masks_too(tmp_path: Path) -> None:
    uplink = {"name": "rand-k", "ratio": 0.5, "bits": 16}
    changed = config(
        algorithm={**CONFIG["algorithm"], "uplink": uplink},
        privacy={**CONFIG["privacy"], "secure_aggregation": True, "losses": "hidden"},
        evaluation={"every": 2},
    )
    with Federation(changed, tmp_path) as federation:
        for worker in "01":
            federation.start(worker, "--trust-server-keys", "--min-workers", "2")
        status = federation.wait_until(lambda status: status["last"] is not None)
        assert "epsilon 8 at delta 1e-05" in status["record_privacy"]
        federation.finish()
    means = federation.records("evaluation")[-1]["means"]
    assert 7.9 < means["privacy_epsilon"] <= 8.0
