"""Runs that protect each record: what is sent again, what is counted, and when a worker ends."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from afl.runs.durable import DamagedError, read_record
from afl.site.audit import digest_of, read_log
from support import Federation
from support.longer import but_long

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


def newest(journal: Path) -> tuple[dict[str, Any], str]:
    """The newest record of a journal, and the digest of its payload."""
    content = memoryview(journal.read_bytes())
    room = len(content) // 2
    found = []
    for place in (content[:room], content[room:]):
        with contextlib.suppress(DamagedError):
            found.append(read_record(place))
    record = max(found, key=lambda each: each.values["sequence"])
    return record.values, digest_of(record.sections[: len(record.values["payloads"])])


@pytest.mark.long
def test_a_worker_that_is_killed_sends_what_it_had_drawn_and_counts_it_once(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("epsilon: 8.0\ndelta: 1.0e-5\naudit: audit.jsonl\nmin_batch: 8\n")
    policy, kept = ("--policy", "site.yaml"), []
    with Federation(CONFIG, tmp_path) as federation:
        federation.start("0")
        # Drawn and journalled, and not sent; then drawn, and not journalled.
        for point in ("after-journal:3", "before-journal:2"):
            killing = {"AFL_FAULT_POINTS": f"worker.{point}:kill"}
            federation.start("1", *policy, environment=killing).expect(-9)
            kept.append(newest(next(tmp_path.glob("afl-journal/*/worker-1.journal"))))
        last = federation.start("1", *policy)
        federation.finish()
        assert last.logged("privacy_planned")[0]["epsilon"] <= 8.0
        assert last.logged("journal_read")
        assert not last.logged("privacy_counted")
        spent = last.logged("privacy_spent")[-1]
    entries = trained(tmp_path / "audit.jsonl")
    fresh = [entry for entry in entries if not entry["again"]]
    assert [entry["round"] for entry in fresh] == list(range(1, ROUNDS + 1))
    for (values, digest), steps in zip(kept, (3, 4), strict=True):
        sent = fresh[steps - 1]
        assert values["position"] == [steps, 0]
        assert values["private_steps"] == steps
        assert (sent["digest"], sent["told"]["losses"]) == (digest, [values["loss"]])
    epsilons = [entry["epsilon"] for entry in fresh]
    assert epsilons == sorted(set(epsilons))
    assert 7.9 < epsilons[-1] == spent["epsilon"] <= 8.0
    for worker in federation.records("evaluation")[-1]["workers"]:
        assert 7.9 < worker["privacy_epsilon"] <= 8.0
    summary = federation.summary()
    assert "epsilon 8 at delta 1e-05" in summary["record_privacy"]
    assert summary["last"]["own_metrics"]["privacy_epsilon"]["largest"] <= 8.0


@pytest.mark.long
def test_a_worker_whose_journal_is_lost_counts_what_may_have_been_sent_and_ends_in_time(
    tmp_path: Path,
) -> None:
    with Federation(CONFIG, tmp_path) as federation:
        federation.start("0")
        worker = federation.start("1", environment={"AFL_FAULT_POINTS": "worker.before-apply:4:kill"})
        worker.expect(-9)
        for file in tmp_path.glob("afl-journal/*/worker-1.journal"):
            file.unlink()
        second = federation.start("1")
        second.expect(ExitCode.PRIVACY)
        (counted,) = second.logged("privacy_counted")
        assert counted["steps"] == 3
        assert "worker 1 may spend an epsilon of 8 at delta 1e-05" in second.logged("ended")[0]["message"]
        (failed,) = federation.server.logged("worker_failed")
        assert "one more would cost too much" in failed["message"]
        assert federation.server.is_running, "it waits for the worker, as configured"


@pytest.mark.parametrize("spoil", but_long(["older", "damaged"], "damaged"))
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


@pytest.mark.long
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
