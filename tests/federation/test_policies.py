"""Runs that go on without some of their workers, and runs that end because they must."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import support
from afl.config import config_from_mapping
from afl.errors import ExitCode
from afl_lab.simulation.run import simulate
from support import Federation, Proxy, run_together

SLOW_TASK = ("--task", "tests_tasks:Slow")
SKIP = {"policy": "skip", "deadline": "300ms", "quorum": 0.5}


def config_of(rounds: int, *, faults: dict[str, Any], **server: Any) -> dict[str, Any]:
    return {
        "workers": 3,
        "task": {"name": "tests_tasks:Slow", "batch_size": 8, "options": {"pause": 0.02}},
        "algorithm": {
            "name": "afl-com",
            "rounds": rounds,
            "eta_w": 0.5,
            "eta_q": 0.3,
            "uplink": {"name": "top-k", "ratio": 0.1},
        },
        "evaluation": {"every": 50},
        "faults": faults,
        "server": server,
    }


def absent(federation: Federation, event: str = "round") -> list[list[int]]:
    return [line.get("absent", []) for line in federation.records(event)]


ABSENCES_OF_2 = 'afl_worker_incidents_total{incident="absent",worker="2"}'
"""On a busy machine others may be late as well."""


@pytest.mark.long
def test_a_worker_that_is_stopped_is_left_out_and_comes_back_with_what_it_was_late_with(
    tmp_path: Path,
) -> None:
    config = config_of(120, faults={"stragglers": {**SKIP, "deadline": "700ms"}})
    with Federation(config, tmp_path) as federation:
        for ids in ("0", "1"):
            federation.start(ids, *SLOW_TASK)
        sleeper = federation.start("2", *SLOW_TASK)
        for round_ in (10, 50):
            federation.wait_until(lambda status, due=round_: status["round"] >= due)
            sleeper.send_signal(signal.SIGSTOP)
            before = federation.metrics()[ABSENCES_OF_2]
            federation.wait_until(lambda _, due=before + 3: federation.metrics()[ABSENCES_OF_2] >= due)
            sleeper.send_signal(signal.SIGCONT)
        federation.finish()
        assert len(sleeper.logged("put_back", worker=2)) >= 2
        assert len(sleeper.logged("report_answered", worker=2, status="late")) >= 2
        assert federation.server.logged("digest_mismatch") == []
        assert federation.server.logged("reconnecting") == []
    rounds = absent(federation)
    assert len(rounds) == 120
    # On a busy machine another may be late as well.
    assert 6 <= sum(2 in entry for entry in rounds) <= 60
    assert 2 not in absent(federation, "evaluation")[-1]


def test_a_run_may_be_gone_on_with_under_another_policy_and_its_workers_live_on(tmp_path: Path) -> None:
    config = config_of(100_000, faults={"stragglers": {**SKIP, "deadline": "500ms"}})
    waits = ["--set", 'faults.stragglers={"policy": "wait"}']
    with Federation(config, tmp_path) as federation:
        listen = ["--set", f"server.listen={federation.address}"]
        for ids in ("0", "1", "2"):
            federation.start(ids, *SLOW_TASK)
        sleeper = federation.workers[2]
        federation.wait_until(lambda status: status["round"] >= 5)
        sleeper.send_signal(signal.SIGSTOP)
        federation.wait_until(lambda _: federation.metrics()["afl_absent_reports_total"] >= 2)

        federation.server.kill()
        federation.start_server(*listen, *waits)
        federation.server.wait_for("worker_ready", count=2)
        last_without = federation.status()["round"]
        sleeper.send_signal(signal.SIGCONT)
        federation.wait_until(lambda status: status["round"] >= last_without + 5)
        assert sleeper.logged("put_back", worker=2), "what it was late with is not lost"
        assert federation.metrics()["afl_late_reports_total"] >= 1

        federation.workers[1].kill()
        federation.server.wait_for("session_ended", workers="[1]")
        federation.server.terminate()
        federation.server.expect(130)
        last_with = federation.summary()["rounds"]
        federation.start_server(*listen)
        federation.wait_until(lambda status: status["round"] >= last_with + 2)
        federation.server.terminate()
        federation.server.expect(130)
        assert not any(server.logged("lost_residual") for server in federation.servers)
    rounds = absent(federation)
    assert [2] in rounds[:last_without]
    assert rounds[last_without:last_with] == [[]] * (last_with - last_without)
    assert all(1 in entry for entry in rounds[last_with:])


@pytest.mark.long
def test_a_worker_that_never_starts_is_done_without_and_no_model_is_called_the_best(tmp_path: Path) -> None:
    config = config_of(8, faults={"stragglers": SKIP})
    with Federation(config, tmp_path) as federation:
        for ids in ("0", "1"):
            federation.start(ids, *SLOW_TASK)
        federation.finish()
    assert absent(federation) == [[2]] * 8
    (evaluation,) = federation.records("evaluation")
    assert evaluation["absent"] == [2]
    assert evaluation["workers"][2] == {}
    assert federation.summary()["best"] is None
    assert not (federation.directory / "model-best.safetensors").exists()


def test_a_worker_that_comes_after_the_end_leaves_no_journal_of_a_process_before_it(
    tmp_path: Path,
) -> None:
    config = config_of(15, faults={"stragglers": SKIP})
    config["workers"] = 2
    journal = tmp_path / "journal"
    options = (*SLOW_TASK, "--journal", str(journal))
    with Proxy() as door, Federation(config, tmp_path) as federation:
        # It is through with its imports by the time it is let in.
        successor = federation.start("1", *options, server=door.address)
        federation.start("0", *options)
        first = federation.start("1", *options)
        federation.wait_until(lambda _: any(journal.glob("*/worker-1.journal")))
        first.kill()
        federation.workers.remove(first)
        federation.wait_until(lambda status: status["state"] == "over")
        assert any(journal.glob("*/worker-1.journal"))
        door.aim(federation.port)
        federation.finish()
    assert not successor.logged("joined")
    assert not journal.exists()


@pytest.mark.slow
def test_the_late_are_counted_and_the_run_waits_for_a_quorum(tmp_path: Path) -> None:
    config = config_of(100_000, faults={"stragglers": {**SKIP, "quorum": 1}})
    with Federation(config, tmp_path) as federation:
        federation.start("0,1", *SLOW_TASK)
        federation.server.wait_for("worker_ready")
        assert federation.wait_until(lambda status: status["open_step_seconds"] > 1)["round"] == 0
        sleeper = federation.start("2", *SLOW_TASK)
        federation.wait_until(lambda status: status["round"] >= 5)
        sleeper.kill()
        assert federation.wait_until(lambda status: status["open_step_seconds"] > 1)["round"] >= 5
        assert federation.metrics()["afl_absent_reports_total"] == 0


@pytest.mark.parametrize(
    "uplink",
    [{"name": "top-k", "ratio": 0.5}, {"name": "rand-k", "ratio": 0.5, "bits": 4}],
    ids=["top-k", "integers"],
)
def test_numbers_that_are_not_finite_are_left_out_as_in_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uplink: dict[str, Any]
) -> None:
    config = {
        "workers": 3,
        "task": {"name": "tests_tasks:Poisoned", "batch_size": 4},
        "algorithm": {
            "name": "afl-com",
            "rounds": 40,
            "eta_w": 0.1,
            "eta_q": 0.1,
            "uplink": uplink,
        },
        "evaluation": {"every": 10},
        "faults": {"non_finite": "skip"},
    }
    federation = run_together(config, tmp_path / "real", ["0", "1-2"])
    rounds = absent(federation)
    assert {tuple(entry) for entry in rounds} == {(), (1,)}
    assert federation.server.logged("non_finite", worker=1)

    whole = config_from_mapping({**config, "run": {"seed": 7}})
    monkeypatch.syspath_prepend(str(Path(support.__file__).parent))
    simulate(whole, tmp_path / "simulated")
    simulated = load_file(tmp_path / "simulated" / "model-final.safetensors")
    assert {name: tensor.numpy().tobytes() for name, tensor in sorted(simulated.items())} == (
        federation.model_bytes()
    )


@pytest.mark.slow
def test_too_few_finite_numbers_end_the_run(tmp_path: Path) -> None:
    config = {
        "workers": 2,
        "task": {"name": "tests_tasks:Diverging", "batch_size": 4},
        "algorithm": {"name": "afl-br", "rounds": 40, "eta_w": 0.1, "eta_q": 0.1},
        "faults": {"non_finite": "skip", "stragglers": {**SKIP, "quorum": 1}},
    }
    with Federation(config, tmp_path) as federation:
        for ids in ("0", "1"):
            federation.start(ids, "--task", "tests_tasks:Diverging")
        federation.server.expect(ExitCode.DIVERGED)
    assert federation.summary()["reason"] == (
        "round 5: 1 of 2 workers have nothing finite to report; the quorum is 2: worker 1: the loss is nan"
    )


@pytest.mark.slow
def test_a_loss_that_stays_too_high_ends_the_run(tmp_path: Path) -> None:
    config = config_of(40, faults={"divergence": {"max_loss": 1e-9, "evaluations": 2}})
    config["evaluation"] = {"every": 5}
    with Federation(config, tmp_path) as federation:
        federation.start("0-2", *SLOW_TASK)
        federation.server.expect(ExitCode.DIVERGED)
    assert [line["round"] for line in federation.records("evaluation")] == [5, 10]
    reason = federation.summary()["reason"]
    assert reason.startswith("the run has diverged: after round 10 the loss of worker ")
    assert (
        "above faults.divergence.max_loss (1e-09) at 2 evaluations in a row; lower algorithm.eta_w" in reason
    )


@pytest.mark.long
def test_a_server_without_workers_gives_up_and_can_go_on(tmp_path: Path) -> None:
    config = config_of(60, faults={}, give_up_after="4s")
    with Proxy() as door, Federation(config, tmp_path) as federation:
        # Its start does not count.
        federation.start("0-2", *SLOW_TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 10)
        federation.workers[0].kill()
        federation.server.expect(ExitCode.LOST_WORKERS)
        assert federation.summary()["reason"] == "no worker had a session for server.give_up_after (4s)"
        federation.start_server("--set", "server.give_up_after=1h")
        federation.start("0-2", *SLOW_TASK)
        federation.server.expect(0)
    assert [line["round"] for line in federation.records("round")] == list(range(1, 61))
