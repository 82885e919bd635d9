"""Workers that answer each step as no task would: of another model, or with losses of 1.7e308."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afl.core.messages import EVALUATION_PHASE
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


def gradient(worker: int, position: pb.Position, loss: float) -> pb.WorkerFrame:
    payload = pb.Payload(
        role="ROLE_UPDATE",
        encoding="ENCODING_DENSE",
        value_type="VALUE_TYPE_FLOAT32",
        dim=DIM,
        count=DIM,
        value_bytes=4 * DIM,
    )
    report = pb.Report(worker=worker, position=position, loss=loss, examples=8, payloads=[payload])
    values = np.full(DIM, 0.5, dtype="<f4").tobytes()
    return pb.WorkerFrame(reports=[report], chunks=[pb.Chunk(worker=worker, data=values)])


def take_part(
    client: RawClient, worker: int = 0, *, loss: float = 1.0, digest: bytes = b"x" * 16
) -> list[int]:
    """Answer whatever the worker is asked for until the end of the run; the kinds of the steps that came."""
    client.send(ready=client.ready_message(client.join([worker])))
    kinds: list[int] = []
    while (frame := client.receive()) is not None:
        if frame.HasField("step"):
            kinds.append(frame.step.kind)
        if not frame.HasField("commit") or kinds[-1] == pb.KIND_MODEL:
            continue
        position = frame.commit.position
        if position.phase == EVALUATION_PHASE:
            metrics = [pb.Metric(name=name, value=loss) for name in ("loss", "own")]
            report = pb.Report(
                worker=worker, position=position, loss=loss, examples=8, metrics=metrics, model_digest=digest
            )
            client.send(reports=[report])
        else:
            client.send(gradient(worker, position, loss))
    return kinds


@pytest.mark.parametrize("wrong_round", [1, 2], ids=["in the middle", "at the end"])
def test_each_evaluation_compares_logs_and_counts(wrong_round: int, tmp_path: Path) -> None:
    """Worker 0's digest is wrong at every evaluation."""
    config = {**CONFIG, "evaluation": {"every": wrong_round}}
    with Staying(config, tmp_path / "f") as federation:
        federation.start("1")
        with RawClient(federation.port) as client:
            kinds = take_part(client)
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


def strictly(text: str) -> Any:
    """JSON, in which there is neither infinity nor NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_losses_near_the_largest_number_have_a_mean(tmp_path: Path) -> None:
    """Two of 1.7e308, whose sum is no number."""
    config = {**CONFIG, "workers": 3}
    large = 1.7e308
    with Staying(config, tmp_path / "f") as federation, contextlib.ExitStack() as stack:
        federation.start("2")
        clients = [stack.enter_context(RawClient(federation.port)) for _ in range(2)]
        threads = [
            threading.Thread(target=take_part, args=(client,), kwargs={"loss": large, "worker": worker})
            for worker, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        federation.server.wait_for("staying")
        for thread in threads:
            thread.join()
        for path in ("state", "workers", "history", "events"):
            strictly(federation.get(f"/data/{path}.json"))
        last = strictly(federation.get("/status"))["last"]
        federation.server.terminate()
        federation.server.expect(0)
    assert last["max_loss"] == large
    assert last["mean_loss"] == pytest.approx(2 / 3 * large)
    assert last["own_metrics"]["own"]["mean"] == large
    for line in (federation.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = strictly(line)
        assert entry["loss_mean" if entry["event"] == "round" else "mean_loss"] == pytest.approx(
            2 / 3 * large
        )
    summary = strictly((federation.directory / "summary.json").read_text(encoding="utf-8"))
    assert summary["last"] == last
    assert "Warning" not in federation.server.text, "nothing overflows on the way to a page either"
