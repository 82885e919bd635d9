"""The server is killed or stopped at any time and started again: the result is the same to the bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support import Federation, Proxy, run_together

TOP_K = {"name": "top-k", "ratio": 0.2}

BASE = {
    "workers": 3,
    "task": {"name": "tests_tasks:Slow", "batch_size": 8, "options": {"pause": 0.01}},
    "evaluation": {"every": 7},
    "server": {"checkpoint_every": 10, "heartbeat": "0.2s", "peer_timeout": "5s"},
}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "top-k": {"name": "afl-com", "rounds": 40, "eta_w": 0.5, "eta_q": 0.3, "block": 7, "uplink": TOP_K},
    "drfa": {"name": "drfa", "rounds": 60, "eta_w": 0.3, "eta_q": 0.05, "local_steps": 3},
}

GROUPS = ("0", "1-2")

TASK = ("--task", "tests_tasks:Slow")

VARYING = {
    "seconds",
    *(f"{way}_{what}" for way in ("uplink", "downlink") for what in ("bytes", "float_equivalents")),
}
"""What a run's lines say that depends on when who was connected."""


def config_of(algorithm: str, **server: Any) -> dict[str, Any]:
    return {**BASE, "algorithm": ALGORITHMS[algorithm], "server": {**BASE["server"], **server}}  # type: ignore[dict-item]


def results(federation: Federation) -> dict[str, Any]:
    """All that a run leaves but for times and bytes."""
    ours = (
        "seconds",
        "uplink_bytes",
        "downlink_bytes",
        "downlink_float_equivalents",
        "uplink_float_equivalents",
    )
    lines = [
        {key: value for key, value in line.items() if key not in ours}
        for event in ("round", "evaluation")
        for line in federation.records(event)
    ]
    return {
        "lines": lines,
        **{name: federation.model_bytes(name) for name in ("final", "random", "best")},
        "summary": {key: federation.summary()[key] for key in ("result", "rounds", "last", "best")},
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        name: results(run_together(config_of(name), folder / name, GROUPS, task=TASK[1]))
        for name in ALGORITHMS
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("state", ["process", "machine"])
def test_a_server_that_is_killed_again_and_again_goes_on(tmp_path: Path, undisturbed, algorithm, state):
    with Proxy() as door, Federation(config_of(algorithm, state=state), tmp_path) as federation:
        for ids in GROUPS:
            federation.start(ids, *TASK, server=door.address)
        door.aim(federation.port)
        rounds = ALGORITHMS[algorithm]["rounds"]
        for due in (0.2, 0.45, 0.8):
            federation.wait_until(lambda status, due=due: status["round"] >= due * rounds)
            federation.server.kill()
            federation.start_server()
            door.aim(federation.port)
        federation.finish()
        for server in federation.servers[1:]:
            assert server.logged("resumed"), server.text
        assert (
            len({line["run_id"] for server in federation.servers for line in server.logged("listening")}) == 1
        )
    assert results(federation) == undisturbed[algorithm]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_finishes_its_round_and_goes_on(tmp_path: Path, undisturbed, number):
    with Proxy() as door, Federation(config_of("top-k"), tmp_path) as federation:
        for ids in GROUPS:
            federation.start(ids, *TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 15)
        federation.server.send_signal(number)
        federation.server.expect(130)
        assert federation.summary()["result"] == "interrupted"
        federation.start_server()
        door.aim(federation.port)
        federation.finish()
    assert results(federation) == undisturbed["top-k"]


def test_a_run_goes_on_elsewhere_with_its_own_configuration(tmp_path: Path, undisturbed):
    with Proxy() as door, Federation(config_of("top-k"), tmp_path / "here") as federation:
        for ids in GROUPS:
            federation.start(ids, *TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 12)
        federation.server.kill()
        moved = tmp_path / "elsewhere"
        federation.directory.rename(moved)
        federation.directory = moved
        (federation.folder / "server.yaml").unlink()
        federation.start_resumed(moved)
        door.aim(federation.port)
        federation.finish()
    assert results(federation) == undisturbed["top-k"]


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path):
    with Federation(config_of("top-k"), tmp_path) as federation:
        federation.server.wait_for("listening")
        federation.server.kill()
        server = federation.start_server("--set", "algorithm.eta_w=0.25", "--set", "server.grace=3s")
        server.expect(2)
        assert "algorithm.eta_w: the run's is 0.5, given is 0.25" in server.text
        assert "grace" not in server.text


def test_two_servers_cannot_run_one_run(tmp_path: Path):
    with Federation(config_of("top-k"), tmp_path) as federation:
        federation.server.wait_for("listening")
        second = federation.start_server()
        second.expect(2)
        assert "in use by another process" in second.text


def test_a_run_that_is_complete_is_not_begun_again(tmp_path: Path):
    federation = run_together(config_of("top-k"), tmp_path, GROUPS, task=TASK[1])
    before = json.dumps(federation.summary())
    with federation:
        federation.server.expect(2)
        assert "already holds a run, which is complete" in federation.server.text
    assert json.dumps(federation.summary()) == before


def test_a_damaged_checkpoint_costs_nothing(tmp_path: Path, undisturbed):
    with Proxy() as door, Federation(config_of("top-k"), tmp_path) as federation:
        for ids in GROUPS:
            federation.start(ids, *TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 25)
        federation.server.kill()
        newest = max((federation.directory / "state").glob("checkpoint-*[0-9]"))
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
        federation.start_server()
        door.aim(federation.port)
        federation.finish()
        assert federation.server.logged("checkpoint_damaged")
        assert not federation.server.logged("rounds_lost")
    assert results(federation) == undisturbed["top-k"]
