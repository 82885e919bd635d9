"""Processes that claim the same workers at once: whoever came first, and answers, keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afl.v1 import federation_pb2 as pb
from support import Federation, RawClient

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 10, "examples": 16}},
    "algorithm": {"name": "afl-br", "rounds": 2, "eta_w": 0.05, "eta_q": 0.3},
    # The heartbeats that come are those that ask who is alive.
    "server": {"heartbeat": "1h", "peer_timeout": "2h"},
}


def test_a_worker_taken_while_another_is_waited_for_is_its_first_comers(tmp_path: Path) -> None:
    with (
        Federation(CONFIG, tmp_path / "f") as federation,
        RawClient(federation.port) as silent,
        RawClient(federation.port) as greedy,
        RawClient(federation.port) as quick,
    ):
        silent.join([1])
        greedy.send(join=greedy.join_message([0, 1]))
        assert silent.receive_part("heartbeat").reply_wanted, "it is asked whether it is alive, in vain"
        quick.join([0])
        assert quick.receive_part("heartbeat").reply_wanted
        quick.send(heartbeat=pb.Heartbeat())
        goodbye = greedy.goodbye()
        assert goodbye.status == pb.Goodbye.STATUS_REFUSED
        assert "worker 0 is taken: another process" in goodbye.reason
        assert silent.goodbye().status == pb.Goodbye.STATUS_TRY_LATER
        # It still speaks for worker 0: a failure of another's ends a session.
        quick.send(failure=pb.Failure(worker=0, message="still here"))
        federation.server.wait_for("worker_failed", worker=0, saying="still here")
        with RawClient(federation.port) as late:
            late.send(join=late.join_message([0]))
            assert quick.receive_part("heartbeat").reply_wanted, "the one who speaks for it is asked"
            quick.send(heartbeat=pb.Heartbeat())
            assert late.goodbye().status == pb.Goodbye.STATUS_REFUSED


def test_two_that_claim_each_others_workers(tmp_path: Path) -> None:
    """Each waits for a worker that says nothing; one gets all that it asks for, the other is refused."""
    with (
        Federation(CONFIG, tmp_path / "f") as federation,
        RawClient(federation.port) as silent,
        RawClient(federation.port) as one,
        RawClient(federation.port) as other,
    ):
        silent.join([0, 1])
        one.send(join=one.join_message([0, 1]))
        assert silent.receive_part("heartbeat").reply_wanted
        other.send(join=other.join_message([1]))
        welcome = one.receive_part("welcome")
        assert [entry.worker for entry in welcome.workers] == [0, 1]
        goodbye = other.goodbye()
        assert goodbye.status == pb.Goodbye.STATUS_REFUSED
        assert "worker 1 is taken" in goodbye.reason
