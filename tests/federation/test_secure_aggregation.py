"""Masked messages through real processes: the sum is what it is without masks, whoever comes and goes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from afl.daemon.fault_points import VARIABLE
from support import Federation, Reference, run_together
from support.drill import Drill, Faults
from support.identities import Identities, tls


def config_of(compressor: dict[str, Any], workers: int = 3, rounds: int = 60) -> dict[str, Any]:
    return {
        "workers": workers,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 100}},
        "algorithm": {
            "name": "afl-com",
            "rounds": rounds,
            "block": 7,
            "eta_w": 0.9,
            "eta_q": 0.3,
            "uplink": compressor,
        },
        "evaluation": {"every": 20},
        "privacy": {"secure_aggregation": True},
    }


RAND_K = {"name": "rand-k", "ratio": 0.2, "bits": 16}


@pytest.mark.parametrize(
    ("compressor", "workers", "groups"),
    [
        (RAND_K, 3, ["0", "1", "2"]),
        ({"name": "dct-projection", "ratio": 0.2, "bits": 12}, 10, ["0-3", "4,6,8", "5,7,9"]),
        pytest.param({"name": "identity", "bits": 10}, 50, ["0-19", "20-49"], marks=pytest.mark.long),
    ],
    ids=["rand-k, 3", "dct-projection, 10", "identity, 50"],
)
def test_a_masked_run_is_the_papers_algorithm_to_the_bit(
    compressor: dict[str, Any], workers: int, groups: list[str], tmp_path: Path
) -> None:
    config = config_of(compressor, workers)
    federation = run_together(config, tmp_path / "run", groups)
    reference = Reference.of(config)
    assert federation.model("final")["w"].numpy().tobytes() == reference.weights[-1].tobytes()
    assert [line["loss_max"] for line in federation.records("round")] == [
        round_losses.max() for round_losses in reference.losses
    ]
    assert not federation.server.logged("digest_mismatch")
    up = federation.summary()["communication"]["uplink"]["payload_bytes_by_part"]
    values = 100 if compressor["name"] == "identity" else 20
    # And one integer for the model's one tensor; a projection has one grid too.
    a_message = -(-(values + 1) * compressor["bits"] // 8)
    assert up["values"] == len(groups) * 60 * a_message


def keys_of(federation: Federation, worker: int) -> dict[str, Any]:
    (path,) = federation.folder.glob(f"afl-journal/*/worker-{worker}.keys")
    assert path.stat().st_mode & 0o777 == 0o600
    content: dict[str, Any] = json.loads(path.read_text())
    return content


SLOW = {"name": "tests_tasks:Slow", "batch_size": 8, "options": {"pause": 0.03}}


def slow_config(**worker: Any) -> dict[str, Any]:
    config = config_of({"name": "rand-k", "ratio": 0.2, "bits": 16})
    return {**config, "task": SLOW, "worker": worker, "server": {"heartbeat": "0.2s"}}


@pytest.mark.long
def test_who_comes_back_with_its_journal_goes_on_with_its_keys(tmp_path: Path) -> None:
    config = slow_config()
    options = ("--task", SLOW["name"], "--trust-server-keys")
    expected = run_together(config, tmp_path / "quiet", ["0", "1", "2"]).model_bytes()
    with Federation(config, tmp_path / "run") as federation:
        first, *_ = (federation.start(ids, *options) for ids in ("0", "1", "2"))
        federation.wait_until(lambda status: status["round"] > 5)
        before = keys_of(federation, 0)
        first.kill()
        federation.start("0", *options)
        federation.wait_until(lambda status: status["round"] > 12)
        assert keys_of(federation, 0) == before
        federation.finish()
    assert federation.model_bytes() == expected


def test_who_has_lost_its_journal_makes_all_take_new_keys(tmp_path: Path) -> None:
    config = slow_config(journal="off")
    options = ("--task", SLOW["name"], "--trust-server-keys")
    with Federation(config, tmp_path / "run") as federation:
        first, *others = (federation.start(ids, *options) for ids in ("0", "1", "2"))
        federation.wait_until(lambda status: status["round"] > 5)
        first.kill()
        federation.start("0", *options)
        federation.finish()
        assert [line["epoch"] for line in federation.server.logged("key_epoch")] == [2]
        for worker in others:
            assert [line["epoch"] for line in worker.logged("keys_agreed")] == [1, 2]
            assert [line["epoch"] for line in worker.logged("begun_anew")] == [2]


def test_who_was_killed_in_the_middle_of_an_entry_goes_on_with_its_keys(tmp_path: Path) -> None:
    config = slow_config()
    options = ("--task", SLOW["name"], "--trust-server-keys")
    expected = run_together(config, tmp_path / "quiet", ["0", "1", "2"]).model_bytes()
    with Federation(config, tmp_path / "run") as federation:
        first = federation.start("0", *options, environment={VARIABLE: "worker.mid-journal:7:kill"})
        for ids in ("1", "2"):
            federation.start(ids, *options)
        first.expect(-signal.SIGKILL)
        federation.workers.remove(first)
        first.close()
        federation.start("0", *options)
        federation.finish()
        assert not federation.server.logged("key_epoch")
    assert federation.model_bytes() == expected


def test_keys_that_end_an_epoch_are_refused_where_no_residual_may_be_lost(tmp_path: Path) -> None:
    config = {**slow_config(), "faults": {"lost_residual": "refuse"}}
    options = ("--task", SLOW["name"], "--trust-server-keys")
    with Federation(config, tmp_path / "run") as federation:
        first, *_ = (federation.start(ids, *options) for ids in ("0", "1", "2"))
        federation.wait_until(lambda status: status["round"] > 5)
        first.kill()
        (keys,) = federation.folder.glob("afl-journal/*/worker-0.keys")
        keys.unlink()
        again = federation.start("0", *options)
        again.expect(3)
        assert "comes with other keys, under which all workers would begin without" in again.text
        assert not federation.server.logged("key_epoch")
        federation.server.kill()


def test_a_worker_that_knows_its_peers_takes_no_part_without_masks(tmp_path: Path) -> None:
    identities = Identities(tmp_path / "pki")
    config = config_of(RAND_K, rounds=10)
    config["server"] = {"tls": tls(identities.server(), identities.ca)}
    del config["privacy"]
    with Federation(config, tmp_path / "run") as federation:
        known = ("--ca", str(identities.ca), "--peer-ca", str(identities.ca))
        worker = federation.start("0", *identities.worker("0").worker_options, *known)
        worker.expect(3)
        assert "the run has no secure aggregation, and this worker was told how to know" in worker.text
        federation.server.kill()


def test_whoever_loses_its_keys_at_any_time_the_run_goes_on(tmp_path: Path) -> None:
    config = {**slow_config(journal="off"), "evaluation": {"every": 10}}
    config["algorithm"] = {**config["algorithm"], "rounds": 40}
    drill = Drill(config, tmp_path, ["0", "1,2"])
    federation = drill.run(Faults(kills=5, cuts=2, pause=4.0, seed=3))
    assert federation.summary()["result"] == "ok"
    assert drill.kills


def test_keys_are_signed_by_the_workers_certificates(tmp_path: Path) -> None:
    identities = Identities(tmp_path / "pki")
    config = config_of(RAND_K, rounds=10)
    config["server"] = {"tls": tls(identities.server(), identities.ca)}
    with Federation(config, tmp_path / "run") as federation:
        for worker in range(3):
            pair = identities.worker(str(worker))
            known = ("--ca", str(identities.ca), "--peer-ca", str(identities.ca))
            federation.start(str(worker), *pair.worker_options, *known)
        federation.finish()
