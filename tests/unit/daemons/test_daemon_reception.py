"""Sessions of a real coordinator, without sockets: who is cut, asked and paused when several come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afl._version import __version__
from afl.config import config_from_mapping
from afl.core.algorithms.local_sgd import model_header, model_payload
from afl.core.messages import NOWHERE, FailureCause, GoodbyeStatus, Kind, Payload, Position, Report, Role
from afl.core.randomness import SharedRandomness
from afl.errors import ExitCode, ProtocolError
from afl.security.identity import WorkerIds
from afl.tasks.initialization import build_vector, realization_digest
from afl.tasks.registry import load_task
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import PROTOCOL, Frame, chunk_frames, report_frame
from afl_server.coordinator import Coordinator
from afl_server.federation.broadcast import Broadcast
from afl_server.network.authentication import Grant, Identity
from afl_server.session import Session, State
from afl_server.storage.run_directory import open_run

FIRST = Position(1, 0)
NOBODY_IN_PARTICULAR = Identity()


class Run:
    """A run of ``synthetic``, and peers that say what a worker would."""

    def __init__(self, folder: Path, state: str = "off", **algorithm: Any) -> None:
        config = config_from_mapping(
            {
                "workers": 3,
                "task": {"name": "synthetic", "batch_size": 8},
                "algorithm": {"rounds": 4, "eta_w": 0.1, "local_steps": 2, **algorithm},
                "run": {"seed": 7, "directory": str(folder / "run")},
                "server": {"chunk_bytes": "4KiB", "reorder_buffer": "4KiB", "state": state},
            }
        )
        randomness = SharedRandomness.from_int(7)
        self.vector = build_vector(load_task("synthetic", {"dim": 2000}, allow_path=True), randomness)
        self.open = open_run(config, 7)
        self.reported: dict[Session, Position] = {}
        self.differing: dict[int, Position] = {}
        self.coordinator = Coordinator(self.open, self.vector, randomness)

    async def join(
        self,
        *workers: int,
        process: bytes,
        applied: Position = NOWHERE,
        reported: Position = NOWHERE,
        identity: Identity = NOBODY_IN_PARTICULAR,
    ) -> Session:
        session = self.coordinator.reception.admit("peer", identity)
        join = pb.Join(
            protocol=PROTOCOL,
            package_version=__version__,
            incarnation=process,
            run_id="" if applied == NOWHERE else self.coordinator.run_id,
            applied=pb.Position(round=applied.round, phase=applied.phase),
            workers=workers,
        )
        await session.receive(pb.WorkerFrame(join=join).SerializeToString())
        self.reported[session] = reported
        return session

    async def ready(self, session: Session) -> None:
        reported = dict.fromkeys(session.workers, self.reported[session]) | self.differing
        ready = pb.Ready(
            layout_hash=self.vector.layout_hash(),
            dim=self.vector.dim,
            realization_digest=realization_digest(self.coordinator.engine.algorithm),
            workers=[
                pb.Standing(worker=w, reported=pb.Position(round=at.round, phase=at.phase))
                for w, at in reported.items()
            ],
        )
        await session.receive(pb.WorkerFrame(ready=ready).SerializeToString())

    async def send(self, session: Session, report: Report, payload: Payload, index: int = 0) -> None:
        if index == 0:
            await session.receive(report_frame(report, Kind.TRAIN).data)
        for frame in chunk_frames(pb.WorkerFrame, payload, 4096, worker=report.worker, index=index):
            await session.receive(frame.data)

    def model(self, length: int | None = None, role: Role = Role.ITERATE) -> Payload:
        """All ones, or the beginning of it."""
        values: NDArray[np.float32] = np.ones(self.vector.dim, dtype=np.float32)
        return Payload(model_header(self.vector.dim, role), model_payload(values[:length]).sections)


def asked(session: Session) -> list[list[int]]:
    """The workers that each step queued for the session asks."""
    steps = []
    while not session._outbox.empty():
        item = session._outbox.get_nowait()
        if isinstance(item, Broadcast) and item.step.kind is not Kind.MODEL:
            steps.append([worker for worker in session.workers if worker in item.participants])
    return steps


def last_words(session: Session) -> GoodbyeStatus:
    """How the session was seen off."""
    while True:
        item = session._outbox.get_nowait()
        frame = pb.ServerFrame.FromString(item.data) if isinstance(item, Frame) else pb.ServerFrame()
        if frame.HasField("goodbye"):
            return GoodbyeStatus(frame.goodbye.status)


def drive(folder: Path, what: Callable[[Run], Awaitable[None]], **algorithm: Any) -> None:
    async def main() -> None:
        run = Run(folder, **algorithm)
        try:
            await what(run)
        finally:
            run.open.close()

    asyncio.run(main())


def test_a_sum_that_begins_again_cuts_who_was_told_that_its_report_is_held(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        first = await run.join(0, process=b"A" * 16)
        await run.ready(first)
        second = await run.join(1, process=b"B" * 16)
        await run.ready(second)
        header = (model_header(run.vector.dim),)
        await run.send(second, Report(1, FIRST, 1.0, 8, header), run.model())
        await run.send(first, Report(0, FIRST, 1.0, 8, header), run.model(1000))
        for session in (first, second):
            await run.coordinator.reception.leave(session)

        newcomer = await run.join(0, process=b"C" * 16)
        returned = await run.join(1, process=b"B" * 16, applied=FIRST, reported=FIRST)
        assert run.coordinator.engine.holds(1)
        await run.ready(newcomer)
        assert run.coordinator.engine.restarts == 1
        assert not run.coordinator.engine.holds(1)
        assert returned.state is State.ENDED
        assert newcomer.state is State.READY
        assert asked(newcomer) == [[0]]

    drive(tmp_path, scenario, name="fedavg")


def test_who_was_told_that_its_report_is_held_is_asked_if_the_sum_begins_again(tmp_path: Path) -> None:
    """Two workers of one process, of which one has lost its journal."""

    async def scenario(run: Run) -> None:
        first = await run.join(0, process=b"A" * 16)
        await run.ready(first)
        second = await run.join(1, process=b"B" * 16)
        await run.ready(second)
        header = (model_header(run.vector.dim),)
        await run.send(second, Report(1, FIRST, 1.0, 8, header), run.model())
        await run.send(first, Report(0, FIRST, 1.0, 8, header), run.model(1000))
        for session in (first, second):
            await run.coordinator.reception.leave(session)

        both = await run.join(0, 1, process=b"C" * 16)
        assert both.told_held == {1}
        run.differing = {0: NOWHERE, 1: FIRST}
        await run.ready(both)
        assert run.coordinator.engine.restarts == 1
        assert asked(both) == [[0, 1]]

    drive(tmp_path, scenario, name="fedavg")


def test_who_is_not_drawn_for_the_losses_is_told_that_its_models_counted(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        engine = run.coordinator.engine
        sessions = [await run.join(worker, process=bytes([65 + worker]) * 16) for worker in range(3)]
        for session in sessions:
            await run.ready(session)
        told: list[tuple[int, int]] = []
        undrawn: list[tuple[int, int]] = []
        for round_ in range(1, 4):
            trained = list(engine.participants)
            headers = (model_header(run.vector.dim), model_header(run.vector.dim, Role.SNAPSHOT))
            for worker in trained:
                report = Report(worker, Position(round_, 0), 1.0, 8, headers)
                await run.send(sessions[worker], report, run.model())
                await run.send(sessions[worker], report, run.model(role=Role.SNAPSHOT), index=1)
            assert engine.step.position == Position(round_, 1)
            undrawn += [(worker, round_) for worker in trained if worker not in engine.participants]
            for worker in engine.participants:
                report = Report(worker, engine.step.position, 1.0, 8)
                await sessions[worker].receive(report_frame(report, Kind.LOSS).data)
        for session in sessions:
            while not session._outbox.empty():
                item = session._outbox.get_nowait()
                frame = pb.ServerFrame.FromString(item.data) if isinstance(item, Frame) else pb.ServerFrame()
                assert all(ack.status == pb.Ack.STATUS_ACCEPTED and not ack.reason for ack in frame.acks)
                told += [(ack.worker, ack.position.round) for ack in frame.acks if ack.position.phase == 0]
        assert undrawn, "the seed draws some who train and not measure"
        assert sorted(told) == sorted(undrawn)

    drive(tmp_path, scenario, name="drfa", eta_q=0.1, sampled=1, rounds=8)


def test_who_has_reported_is_not_asked_again(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        session = await run.join(0, 2, process=b"A" * 16)
        await run.ready(session)
        await run.coordinator.reception.leave(session)
        back = await run.join(0, 2, process=b"A" * 16, applied=FIRST)
        run.differing = {0: FIRST, 2: NOWHERE}
        await run.ready(back)
        assert asked(back) == [[2]]
        await run.coordinator.reception.leave(back)
        run.differing = {}
        back = await run.join(0, 2, process=b"A" * 16, applied=FIRST, reported=FIRST)
        await run.ready(back)
        assert asked(back) == []

    drive(tmp_path, scenario, name="fedavg")


def test_the_worker_whose_turn_it_is_is_read_whatever_waits(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        sessions = [await run.join(worker, process=bytes([worker]) * 16) for worker in range(3)]
        for session in sessions:
            await run.ready(session)
        headers = (model_header(run.vector.dim), model_header(run.vector.dim, Role.SNAPSHOT))
        snapshot = run.model(role=Role.SNAPSHOT)
        for worker in (2, 1):
            report = Report(worker, FIRST, 1.0, 8, headers)
            await run.send(sessions[worker], report, run.model())
            if worker == 2:
                await run.send(sessions[worker], report, snapshot, 1)
        # Worker 0's end model closes worker 1's; then worker 0's snapshot opens worker 1's.
        report = Report(0, FIRST, 1.0, 8, headers)
        await run.send(sessions[0], report, run.model())
        assert not run.coordinator.is_congested(sessions[0])
        assert run.coordinator.is_congested(sessions[1])
        await run.send(sessions[0], report, snapshot, 1)
        assert run.coordinator.engine.algorithm.waiting_bytes > run.coordinator.config.server.reorder_buffer
        assert not run.coordinator.is_congested(sessions[1])

    drive(tmp_path, scenario, name="drfa", eta_q=0.1)


def test_a_paused_worker_is_not_taken_for_gone(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        session = await run.join(1, process=b"A" * 16)
        await run.ready(session)
        session.is_paused = True
        rival = await run.join(1, process=b"B" * 16)
        assert rival.state is State.ENDED
        assert run.coordinator.roster.owner(1) is session

    drive(tmp_path, scenario, name="fedavg")


@pytest.mark.parametrize(
    ("state", "status"), [("process", GoodbyeStatus.LEAVING), ("off", GoodbyeStatus.ABORTED)]
)
def test_who_comes_as_the_server_leaves_hears_what_the_others_heard(
    tmp_path: Path, state: str, status: GoodbyeStatus
) -> None:
    """Of a server that will go on, a worker that comes back at once must not hear that the run is over."""

    async def scenario(run: Run) -> None:
        await run.coordinator.start()
        present = await run.join(0, process=b"A" * 16)
        await run.ready(present)
        run.coordinator.stop("a good reason")
        assert (await run.coordinator.result)[0] is ExitCode.INTERRUPTED
        assert last_words(present) is status
        assert last_words(await run.join(0, process=b"A" * 16, applied=FIRST)) is status
        assert last_words(await run.join(1, process=b"B" * 16)) is status
        await run.coordinator.reception.leave(present)
        for session in list(run.coordinator.roster):
            await run.coordinator.reception.leave(session)
        await run.coordinator.farewell()

    drive(tmp_path, scenario, state=state, name="fedavg")


def test_nobody_tells_of_another_s_failure(tmp_path: Path) -> None:
    """A failure that is not finite ends the run: it must be the worker's own."""

    async def scenario(run: Run) -> None:
        session = await run.join(0, process=b"A" * 16)
        failure = pb.Failure(worker=1, message="a lie")
        failure.cause = int(FailureCause.NON_FINITE)  # type: ignore[assignment]
        with pytest.raises(ProtocolError, match="a failure of worker 1, which is not one of this session's"):
            await session.receive(pb.WorkerFrame(failure=failure).SerializeToString())
        assert not run.coordinator.is_over
        assert run.coordinator.counters.failures == 0

    drive(tmp_path, scenario, name="fedavg")


def test_whoever_may_not_speak_for_a_worker_neither_takes_it_nor_hears_the_end(
    tmp_path: Path,
) -> None:
    async def scenario(run: Run) -> None:
        await run.coordinator.start()
        stranger = Identity(grants=(Grant("certificate", WorkerIds.parse("2")),))
        owner = await run.join(0, process=b"A" * 16)
        impostor = await run.join(0, process=b"B" * 16, identity=stranger)
        assert last_words(impostor) is GoodbyeStatus.REFUSED
        assert run.coordinator.roster.owner(0) is owner
        unknown = run.coordinator.reception.admit("peer", Identity("no token"))
        assert last_words(unknown) is GoodbyeStatus.REFUSED
        assert len(run.coordinator.roster) == 2
        run.coordinator.abort(ExitCode.ABORTED, "over")
        late = await run.join(1, process=b"B" * 16, identity=stranger)
        assert last_words(late) is GoodbyeStatus.REFUSED
        assert 1 not in run.coordinator.informed
        for session in list(run.coordinator.roster):
            await run.coordinator.reception.leave(session)
        await run.coordinator.farewell()

    drive(tmp_path, scenario, name="fedavg")
