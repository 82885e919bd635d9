"""Workers of one process report together where their messages are integers: fewer bytes, the same bits."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from afl.config import config_from_mapping
from afl.daemon.fault_points import VARIABLE
from afl_lab.simulation.run import simulate
from support import Federation, Proxy, run_together
from support.proxy import Way

CONFIG: dict[str, Any] = {
    "workers": 10,
    "task": {"name": "digits", "batch_size": 8, "options": {"hidden": [16]}},
    "algorithm": {
        "name": "afl-com",
        "rounds": 30,
        "eta_w": 0.2,
        "eta_q": 0.1,
        "uplink": {"name": "rand-k", "ratio": 0.2, "bits": 4},
    },
    "evaluation": {"every": 10},
}

GROUPINGS = {
    "each alone": tuple(map(str, range(10))),
    "two of five": ("0-4", "5-9"),
    "five of two": ("0,9", "1,8", "2,7", "3,6", "4,5"),
    "all in one": ("0-9",),
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The model of the run in one process, in which each worker's message is added alone."""
    folder = tmp_path_factory.mktemp("simulated")
    simulate(config_from_mapping({**CONFIG, "run": {"seed": 7}}), folder)
    tensors = load_file(folder / "model-final.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in sorted(tensors.items())}


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_the_grouping_changes_no_bit(tmp_path: Path, simulated: dict[str, bytes], grouping: str) -> None:
    groups = GROUPINGS[grouping]
    federation = run_together(CONFIG, tmp_path, groups)
    assert federation.model_bytes() == simulated
    up = federation.summary()["communication"]["uplink"]
    # A double for each worker's loss in 30 rounds, and its loss, accuracy and norm, also by the six tensors,
    # in 3 evaluations; a message for each process.
    assert up["payload_bytes_by_part"]["scalars"] == 8 * 10 * (30 + 3 * (4 + 6))
    assert up["float_equivalents"] == 10 * 30 + up["payload_bytes_by_part"]["values"] / 4
    most = 1 + (242 * (4 + (10 // len(groups) - 1).bit_length()) + 7) // 8
    assert up["payload_bytes_by_part"]["values"] <= 30 * len(groups) * most


def test_workers_that_are_killed_come_back_in_other_groups(
    tmp_path: Path, simulated: dict[str, bytes]
) -> None:
    """Some have journalled their report of the open round, some have sent it, some have not begun."""
    with Federation(CONFIG, tmp_path) as federation:
        first = federation.start("0-4", environment={VARIABLE: "worker.after-journal:38:kill"})
        second = federation.start("5-9", environment={VARIABLE: "worker.mid-journal:52:kill"})
        first.expect(-signal.SIGKILL)
        federation.start("2,4")
        third = federation.start("0,1,3", environment={VARIABLE: "worker.after-journal:6:kill"})
        third.expect(-signal.SIGKILL)
        fourth = federation.start("0,1,3", environment={VARIABLE: "worker.after-journal:4:kill"})
        fourth.expect(-signal.SIGKILL)
        second.expect(-signal.SIGKILL)
        federation.start("0,5,9")
        federation.start("1,3,6-8")
        federation.finish()
        assert not federation.server.logged("lost_residual")
    assert federation.model_bytes() == simulated


def test_a_message_that_is_cut_in_the_middle_goes_on_where_it_was(tmp_path: Path) -> None:
    config = {
        "workers": 4,
        "task": {
            "name": "synthetic",
            "batch_size": 4,
            "options": {"dim": 150_000, "examples": 16, "scale": 1e4},
        },
        "algorithm": {**CONFIG["algorithm"], "rounds": 3, "uplink": {"name": "identity", "bits": 24}},
        "evaluation": {"every": 3},
        "server": {"chunk_bytes": "64KiB"},
    }
    undisturbed = run_together(config, tmp_path / "quiet", ["0", "1-3"])
    with Proxy() as proxy, Federation(config, tmp_path / "cut") as federation:
        due = proxy.cut_after(250_000, Way.UP)
        federation.start("0")
        group = federation.start("1-3", server=proxy.address)
        proxy.aim(federation.port)
        assert due.wait(60)
        due = proxy.cut_after(150_000, Way.UP)
        assert due.wait(60)
        federation.finish()
        kept = [line["kept"] for line in group.logged("joined_again")]
    assert len(kept) == 2
    assert all(size >= 64 * 1024 for size in kept)
    assert federation.model_bytes() == undisturbed.model_bytes()
    gradient = [
        run.summary()["communication"]["uplink"]["payload_bytes_by_part"]["values"]
        for run in (federation, undisturbed)
    ]
    assert gradient[0] - gradient[1] < 2 * 128 * 1024, "what had come was not sent again"


@pytest.mark.long
def test_a_group_that_is_late_puts_back_each_of_its_messages(tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "workers": 4,
        "task": {"name": "tests_tasks:Slow", "batch_size": 8, "options": {"pause": 0.02}},
        "algorithm": {**CONFIG["algorithm"], "rounds": 100},
        "faults": {"stragglers": {"policy": "skip", "deadline": "700ms", "quorum": 0.5}},
    }
    task = ("--task", "tests_tasks:Slow")
    with Federation(config, tmp_path) as federation:
        for ids in ("0", "1"):
            federation.start(ids, *task)
        sleeper = federation.start("2-3", *task)
        # Stopped with nothing on its way, it has nothing to put back.
        for due in range(10, 90, 20):
            federation.wait_until(lambda status, due=due: status["round"] >= due)
            if sleeper.logged("put_back", worker=3):
                break
            sleeper.send_signal(signal.SIGSTOP)
            before = federation.metrics()["afl_absent_reports_total"]
            federation.wait_until(
                lambda _, least=before + 4: federation.metrics()["afl_absent_reports_total"] >= least
            )
            sleeper.send_signal(signal.SIGCONT)
        federation.finish()
        for worker in (2, 3):
            assert sleeper.logged("put_back", worker=worker)
        assert not federation.server.logged("digest_mismatch")
    absences = [set(line.get("absent", ())) & {2, 3} for line in federation.records("round")]
    assert {2, 3} in absences
    assert {frozenset(entry) for entry in absences} <= {frozenset(), frozenset({2, 3})}, "never one alone"
