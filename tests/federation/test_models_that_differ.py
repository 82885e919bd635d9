"""Workers whose model is not the server's: each evaluation finds them, the last one too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afl.messages import EVALUATION_PHASE
from afl.v1 import federation_pb2 as pb
from support import Federation, Process, RawClient

DIM = 10
CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": DIM, "examples": 16}},
    "algorithm": {"name": "afl-br", "rounds": 2, "eta_w": 0.05, "eta_q": 0.3},
    "evaluation": {"every": 1},
}


class Staying(Federation):
    """The server can be asked after the run's end too."""

    def start_server(self, *options: str, environment: Mapping[str, str] | None = None) -> Process:
        return super().start_server("--stay", *options, environment=environment)


def gradient(position: pb.Position) -> pb.WorkerFrame:
    payload = pb.Payload(
        role="ROLE_UPDATE",
        encoding="ENCODING_DENSE",
        value_type="VALUE_TYPE_FLOAT32",
        dim=DIM,
        count=DIM,
        value_bytes=4 * DIM,
    )
    report = pb.Report(position=position, loss=1.0, examples=8, payloads=[payload])
    values = np.full(DIM, 0.5, dtype="<f4").tobytes()
    return pb.WorkerFrame(reports=[report], chunks=[pb.Chunk(data=values)])


def answer(client: RawClient, position: pb.Position, digest: bytes) -> None:
    """What worker 0 is asked for, of a model with this digest."""
    if position.phase != EVALUATION_PHASE:
        client.send(gradient(position))
        return
    metrics = [pb.Metric(name="loss", value=1.0)]
    report = pb.Report(position=position, loss=1.0, examples=8, metrics=metrics, model_digest=digest)
    client.send(reports=[report])


@pytest.mark.parametrize("wrong_round", [1, 2], ids=["in the middle", "at the end"])
def test_each_evaluation_compares_logs_and_counts(wrong_round: int, tmp_path: Path) -> None:
    """Worker 0's digest is wrong at every evaluation, and of the last two rounds one is looked at."""
    config = {**CONFIG, "evaluation": {"every": wrong_round}}
    with Staying(config, tmp_path / "f") as federation:
        federation.start("1")
        with RawClient(federation.port) as client:
            client.send(ready=client.ready_message(client.join([0])))
            kinds: list[int] = []
            while (frame := client.receive()) is not None:
                if frame.HasField("step"):
                    kinds.append(frame.step.kind)
                if frame.HasField("commit") and kinds[-1] != pb.KIND_MODEL:
                    answer(client, frame.commit.position, b"x" * 16)
        federation.server.wait_for("staying")
        found = [line["round"] for line in federation.server.logged("digest_mismatch", worker=0)]
        assert found == list(range(wrong_round, 3, wrong_round))
        metrics = federation.metrics()
        assert metrics["afl_digest_mismatches_total"] == len(found)
        counted = 'afl_worker_incidents_total{incident="digest_mismatch",worker="%d"}'
        assert [metrics[counted % worker] for worker in (0, 1)] == [len(found), 0]
        first = kinds.index(pb.KIND_EVALUATE)
        assert kinds[first:].count(pb.KIND_MODEL) == len(found) - 1, "at the end there is nothing to heal"
        federation.server.terminate()
        federation.server.expect(0)
