"""What happened to a server, written down as it ran, leads to the same place when it is played again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from afl.errors import ConfigError, ExitCode
from afl_server.runner.run import RECORDING
from afl_tools.replay import replay_file
from support import Federation, Proxy

CONFIG: dict[str, Any] = {
    "workers": 4,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 30,
        "eta_w": 0.9,
        "eta_q": 0.3,
    },
    "evaluation": {"every": 20},
}


@pytest.mark.parametrize(
    "uplink",
    [{"name": "top-k", "ratio": 0.1}, {"name": "rand-k", "ratio": 0.5, "bits": 8}],
    ids=["top-k", "joint"],
)
def test_a_recorded_run_is_played_again_to_the_same_bits(tmp_path: Path, uplink: dict[str, Any]) -> None:
    config = {**CONFIG, "algorithm": {**CONFIG["algorithm"], "uplink": uplink}}
    recording = tmp_path / "events.jsonl"
    with (
        Proxy() as proxy,
        Federation(config, tmp_path, environment={RECORDING: str(recording)}) as federation,
    ):
        due = proxy.cut_after(3000)
        for ids in ("0-1", "2-3"):
            federation.start(ids, server=proxy.address)
        proxy.aim(federation.port)
        assert due.wait(60)
        federation.finish()
        model = federation.model("final")
        weights = federation.records("round")[-1]["dual_weight_max"]
    again = replay_file(recording)
    assert again.ending is not None
    assert again.ending.code is ExitCode.OK
    assert again.counters.reconnections > 0, "the cut is part of what is played"
    for name, values in again.engine.model.named_values().items():
        assert torch.equal(values, model[name]), name
    assert again.engine.last_round is not None
    assert np.max(again.engine.last_round.dual_weights) == weights


def test_a_recording_of_a_resumed_server_is_refused(tmp_path: Path) -> None:
    recording = tmp_path / "events.jsonl"
    with Federation(CONFIG, tmp_path) as federation:
        federation.start("0-3")
        federation.server.wait_for("evaluation")
        federation.server.kill()
        for worker in federation.workers:
            worker.kill()
        federation.start_server(environment={RECORDING: str(recording)})
        federation.start("0-3")
        federation.server.wait_for("resumed")
        federation.server.expect(0)
    with pytest.raises(ConfigError, match="only a recording from a run's beginning can be replayed"):
        replay_file(recording)
