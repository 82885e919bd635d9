"""A federation without loop, clock or sockets: peers that do what workers do, a disk that does as it is told.

What a peer reports depends on the worker and the step alone, so that every run of one configuration must end
in the same bits, whatever happens on the way.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from afl._version import __version__
from afl.config import Config, config_from_mapping
from afl.core.aggregation import joint_reports
from afl.core.codecs.integers import integers
from afl.core.messages import (
    NOWHERE,
    AckStatus,
    Encoding,
    GoodbyeStatus,
    Kind,
    Payload,
    PayloadHeader,
    Position,
    Report,
)
from afl.core.rounds.results import Outcome
from afl.errors import ExitCode
from afl.security.identity import Permission
from afl.tasks.initialization import realization_digest
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import PROTOCOL, ack_of
from afl_server.federation import effects, events
from afl_server.federation.broadcast import Broadcast
from afl_server.federation.counters import Moment
from afl_server.federation.evaluation_summary import Ranking
from afl_server.federation.machine import Federation
from afl_server.runner.build import build
from afl_server.storage.checkpointing import Checkpointing
from afl_server.storage.store import Checkpoint

RUN_ID = "20260101-000000-abcdef"
ANYBODY = Permission()


def config_of(*, workers: int = 3, state: str = "process", **changes: Any) -> Config:
    """A small run; ``changes`` are its sections' keys."""
    sections: dict[str, dict[str, Any]] = {
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": 20}},
        "algorithm": {"name": "afl-br", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1},
        "evaluation": {"every": 2},
        "run": {"seed": 7},
        "server": {"state": state, "chunk_bytes": "4KiB", "reorder_buffer": "4KiB"},
        "faults": {},
    }
    for name, values in changes.items():
        sections[name] = {**({} if name == "algorithm" else sections[name]), **values}
    return config_from_mapping({"workers": workers, **sections})


def payload_of(worker: int, position: Position, header: PayloadHeader) -> Payload:
    """Plain values, or integers, that only a worker's report for a step has."""
    assert header.encoding in {Encoding.DENSE, Encoding.SEEDED}
    random = np.random.default_rng([worker, position.round, position.phase, int(header.role)])
    if header.bits:
        limit = (1 << (header.bits - 1)) - 1
        values = random.integers(-limit, limit, header.count, dtype=np.int32, endpoint=True)
        # The one tensor's own.
        values[-1] %= 2
        return integers(header.encoding, header.bits).whole(values, header.role, header.dim)
    return Payload(header, (random.standard_normal(header.count).astype("<f4").view(np.uint8).data,))


def loss_of(worker: int, position: Position) -> float:
    """What only that worker reports for that step."""
    return 1.0 + zlib.crc32(repr((worker, position)).encode()) / 2**32


class Peer:
    """A worker process's side of one stream; a process that lives on is carried from stream to stream.

    Attributes:
        said: what it has yet to say, in order.
    """

    def __init__(self, workers: Sequence[int], incarnation: bytes) -> None:
        self.member = 0
        self.workers = tuple(workers)
        self.incarnation = incarnation
        self.applied = NOWHERE
        self.reported: dict[int, Position] = dict.fromkeys(self.workers, NOWHERE)
        self.said: deque[events.MemberEvent] = deque()
        self.is_welcome = False
        self.goodbye: GoodbyeStatus | None = None
        self.held: set[int] = set()
        self.steps: deque[tuple[Broadcast, tuple[int, ...]]] = deque()


class World:
    """A federation, its peers and its disk.

    Attributes:
        log: the lines that were logged, by the name of their event.
        appended: the outcomes that are durable, in order.
        late: the reports that were answered as late, by worker and position.
    """

    def __init__(self, config: Config, folder: Path = Path()) -> None:
        self.config = config
        self.folder = folder
        self.now = 100.0
        self.peers: dict[int, Peer] = {}
        self.finished: tuple[ExitCode, str] | None = None
        self.released = False
        self.log: list[effects.Log] = []
        self.timers: dict[tuple[str, int], float] = {}
        self.work: deque[effects.Effect] = deque()
        self.appended: list[Any] = []
        self.checkpoint: Checkpoint | None = None
        self.models: dict[str, Any] = {}
        self.hung_up: list[int] = []
        self.paused: set[int] = set()
        self.events: list[tuple[float, events.Event]] = []
        self.late: set[tuple[int, Position]] = set()
        self._undurable: list[Position] = []
        self._told_closed = NOWHERE
        self._numbers = 0
        self.federation = self._made()

    @property
    def is_durable(self) -> bool:
        return self.config.server.state != "off"

    def _made(self) -> Federation:
        self.ranking = Ranking(self.config.divergence_watch)
        federation, self.vector = build(self.config, RUN_ID, self.folder, self.ranking, self.now)
        return federation

    def _realization_digest(self) -> bytes:
        algorithm = self.federation.engine.algorithm
        return realization_digest(algorithm, algorithm.settings, self.vector.dim)

    # Events.

    def handle(self, event: events.Event) -> None:
        self.events.append((self.now, event))
        for effect in self.federation.handle(event, self.now):
            self._carry_out(effect)
        self._check()

    def start(self) -> None:
        self.handle(events.Started())

    def open(self, permission: Permission = ANYBODY) -> int:
        self._numbers += 1
        self.handle(events.Opened(self._numbers, f"peer-{self._numbers}", permission))
        return self._numbers

    def connect(self, peer: Peer, permission: Permission = ANYBODY) -> Peer:
        """Open a stream for a process, and let it join."""
        peer.member = self.open(permission)
        peer.said.clear()
        peer.steps.clear()
        peer.is_welcome, peer.goodbye = False, None
        self.peers[peer.member] = peer
        self.handle(
            events.Joined(
                peer.member,
                peer.workers,
                peer.incarnation,
                PROTOCOL,
                __version__,
                run_id="" if peer.applied == NOWHERE else RUN_ID,
                applied=peer.applied,
            )
        )
        return peer

    def leave(self, peer: Peer) -> None:
        self.peers.pop(peer.member, None)
        self.paused.discard(peer.member)
        self.handle(events.Left(peer.member))

    def ready(self, peer: Peer) -> events.Ready:
        return events.Ready(
            peer.member,
            self.vector.layout_hash(),
            self.vector.dim,
            self._realization_digest(),
            tuple(peer.reported.items()),
        )

    def say(self, peer: Peer) -> bool:
        """Let a peer take what it was sent, and say the next thing; whether it had something to say."""
        self._take_steps(peer)
        if not peer.said or peer.goodbye is not None or peer.member in self.paused:
            return False
        self.handle(peer.said.popleft())
        return True

    def report(self, worker: int, position: Position, kind: Kind) -> list[events.MemberEvent]:
        """What says a worker's report, without its member."""
        return next(self.reports([worker], position, kind))

    def reports(
        self, workers: Sequence[int], position: Position, kind: Kind
    ) -> Iterator[list[events.MemberEvent]]:
        """What says the workers' reports, without their member; a joint one where these are integers."""
        answers = ((kind, self._answer(worker, position, kind)) for worker in workers)
        for _, (report, payloads) in joint_reports(answers):
            found: list[events.MemberEvent] = [events.ReportBegan(0, report)]
            for index, payload in enumerate(payloads):
                half = payload.header.total_bytes // 8 * 4
                for offset, data in ((0, payload.data[:half]), (half, payload.data[half:])):
                    if data:
                        found.append(events.Piece(0, report.worker, index, offset, data))
            yield found

    def _answer(self, worker: int, position: Position, kind: Kind) -> tuple[Report, list[Payload]]:
        engine = self.federation.engine
        headers: tuple[PayloadHeader, ...] = ()
        if kind is not Kind.EVALUATE and position == engine.step.position:
            headers = tuple(engine.collector.expected_payloads(position))
        loss = loss_of(worker, position)
        metrics = {"loss": loss} if kind is Kind.EVALUATE else {}
        payloads = [payload_of(worker, position, header) for header in headers]
        own = tuple(payload.header for payload in payloads)
        return Report(worker, position, loss, 8, own, metrics, self._digest(kind)), payloads

    def _digest(self, kind: Kind) -> bytes:
        engine = self.federation.engine
        model = engine.model
        beside = [companion.content() for companion in engine.algorithm.companions.values()]
        return model.digest(*beside) if kind is Kind.EVALUATE else b""

    def _take_steps(self, peer: Peer) -> None:
        while peer.steps and peer.steps[0][0].is_closed:
            broadcast, workers = peer.steps.popleft()
            step = broadcast.step
            peer.applied = max(peer.applied, step.position)
            if step.kind is Kind.MODEL:
                continue
            asked = [
                worker for worker in broadcast.asked_of(workers) if peer.reported[worker] <= step.position
            ]
            peer.reported.update(dict.fromkeys(asked, step.position))
            self.queue_all(peer, asked, step.position, step.kind)

    def queue(self, peer: Peer, worker: int, position: Position, kind: Kind) -> None:
        """Let the peer report as one worker."""
        self.queue_all(peer, [worker], position, kind)

    def queue_all(
        self,
        peer: Peer,
        workers: Sequence[int],
        position: Position,
        kind: Kind,
        begun: Mapping[int, pb.Expectation] = MappingProxyType({}),
    ) -> None:
        """Let the peer report as all of these; what has begun goes on."""
        for said in self.reports(workers, position, kind):
            began = said[0]
            assert isinstance(began, events.ReportBegan)
            own = begun.get(began.report.worker, pb.Expectation())
            goes_on = tuple(own.others) == began.report.workers[1:]
            for event in said:
                is_piece = isinstance(event, events.Piece)
                if is_piece and goes_on and (event.payload, event.offset) < (own.payload, own.offset):
                    continue
                values = {name: getattr(event, name) for name in type(event).__dataclass_fields__}
                peer.said.append(type(event)(**{**values, "member": peer.member}))

    # Effects.

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Send(member, frame):
                self._received(member, pb.ServerFrame.FromString(frame.data))
            case effects.Follow(member, workers, broadcast):
                if member in self.peers:
                    self.peers[member].steps.append((broadcast, workers))
            case effects.End(member, status, _):
                self.paused.discard(member)
                if member in self.peers:
                    self.peers[member].goodbye = status
            case effects.Read(member, is_wanted):
                (self.paused.discard if is_wanted else self.paused.add)(member)
            case effects.HangUp(member, _):
                self.hung_up.append(member)
                if member in self.peers:
                    # It finds its stream cut, and tries again.
                    self.peers[member].goodbye = GoodbyeStatus.TRY_LATER
            case effects.Timer(name, at, member):
                self.timers.pop((name, member), None)
                if at is not None:
                    self.timers[name, member] = at
            case effects.Log():
                self.log.append(effect)
            case effects.Finish(code, reason):
                assert self.finished is None
                self.finished = (code, reason)
            case effects.Release():
                self.released = True
            case effects.Compute() | effects.Append() | effects.Checkpoint() | effects.SaveModel():
                self.work.append(effect)

    def _received(self, member: int, frame: pb.ServerFrame) -> None:
        peer = self.peers.get(member)
        if peer is None:
            return
        if frame.HasField("welcome"):
            peer.is_welcome = True
            peer.held = {entry.worker for entry in frame.welcome.workers if entry.held}
            peer.said.append(self.ready(peer))
            position, kind = self.federation.engine.step.position, self.federation.engine.step.kind
            # As a worker does: what it has made goes on where the server has it to.
            lacking = {
                entry.worker: entry
                for entry in frame.welcome.workers
                if peer.reported[entry.worker] == position and not entry.held
            }
            self.queue_all(peer, list(lacking), position, kind, lacking)
        if frame.HasField("heartbeat") and frame.heartbeat.reply_wanted:
            peer.said.append(events.FrameCame(member, 4))
        for ack in map(ack_of, frame.acks):
            if ack.status is AckStatus.LATE or not ack.reason:
                self._told_closed = max(self._told_closed, ack.position)
            if ack.status is AckStatus.LATE:
                self.late.update((worker, ack.position) for worker in ack.workers)

    def answer(self) -> bool:
        """Let the first piece of work that is waited for be done; whether there was one."""
        if not self.work:
            return False
        effect = self.work.popleft()
        match effect:
            case effects.Compute(call):
                try:
                    done = events.EngineDone(call())
                except Exception as error:  # noqa: BLE001  # the federation's to judge
                    done = events.EngineDone(error=error)
                self.handle(done)
            case effects.Append(outcome, moment, _):
                self.appended.append((_own(outcome), deepcopy(moment.values())))
                self.handle(events.Written(checkpoint_due=len(self.appended) % 3 == 0))
            case effects.Checkpoint(values, arrays, _, _):
                self.checkpoint = Checkpoint(
                    RUN_ID,
                    len(self.appended),
                    deepcopy(dict(values)),
                    {name: array.copy() for name, array in arrays.items()},
                )
                self.handle(events.Written())
            case effects.SaveModel(name, model, _, _):
                self.models[name] = model
                self.handle(events.ModelWritten(name))
        return True

    def fail(self, reason: str = "the disk is full", *, is_final: bool = False) -> None:
        """Let the first piece of work fail, as a disk does."""
        effect = self.work.popleft()
        if isinstance(effect, effects.Append):
            self._undurable.append(effect.outcome.step.position)
        what = {effects.Append: "outcome", effects.Checkpoint: "checkpoint", effects.SaveModel: "model"}
        self.handle(events.WriteFailed(cast("Any", what[type(effect)]), reason, is_final=is_final))

    def pass_time(self, seconds: float) -> None:
        """Let timers fire in order."""
        until = self.now + seconds
        while True:
            due = sorted((at, name) for name, at in self.timers.items() if at <= until)
            if not due:
                break
            at, name = due[0]
            del self.timers[name]
            self.now = max(self.now, at)
            self.handle(events.TimerFired(*name))
        self.now = until

    def die_and_resume(self) -> None:
        """The server's process ends at once, and another goes on from what is durable."""
        assert self.checkpoint is not None
        checkpoint, since = self.checkpoint, self.appended[self.checkpoint.sequence :]
        for peer in list(self.peers.values()):
            peer.said.clear()
            peer.steps.clear()
        self.peers.clear()
        self.timers.clear()
        self.work.clear()
        self.paused.clear()
        self._undurable.clear()
        self.finished, self.released = None, False
        self.federation = self._made()
        records = SimpleNamespace(round=None, last_evaluation=None, directory="run", config=self.config)
        store = SimpleNamespace(frozen=lambda: b"")
        checkpointing = Checkpointing(cast("Any", store), cast("Any", records), self.vector, 50)
        moment = checkpointing.restore(checkpoint, self.federation.engine)
        outcomes = ((self.now, _own(outcome), Moment.of_values(values)) for outcome, values in since)
        for wanted in self.federation.resume(moment, outcomes):
            for effect in wanted:
                if isinstance(effect, effects.SaveModel):
                    self.models[effect.name] = effect.model
                else:
                    self._carry_out(effect)
        self.start()

    # What must hold, always.

    def _check(self) -> None:
        self._check_told()
        owned: list[int] = []
        for peer in self.peers.values():
            if peer.is_welcome and peer.goodbye is None:
                owned += peer.workers
        assert len(owned) == len(set(owned)), "one owner a worker"

    def _check_told(self) -> None:
        """No step is told of before the outcome of the one before it is durable."""
        if not self.is_durable:
            return
        pending = list(self._undurable)
        pending += [
            effect.outcome.step.position for effect in self.work if isinstance(effect, effects.Append)
        ]
        if not pending:
            return
        assert self._told_closed < pending[0], "told before durable"
        for peer in self.peers.values():
            for broadcast, _ in peer.steps:
                assert not broadcast.is_closed or broadcast.step.position <= pending[0], "told before durable"

    # To the end.

    def settle(self) -> None:
        """Let everybody do all that can be done."""
        while self.answer() or sum(self.say(peer) for peer in list(self.peers.values())):
            pass

    def complete(self) -> tuple[NDArray[np.float32], NDArray[np.float64], list[Any]]:
        """Nothing goes wrong any more: the model, the dual weights and the losses of every step."""
        for _ in range(400):
            self.settle()
            if self.finished is not None:
                break
            for peer in list(self.peers.values()):
                if peer.goodbye is not None or not peer.is_welcome:
                    self.leave(peer)
            present = {worker for peer in self.peers.values() for worker in peer.workers}
            for worker in set(range(self.config.workers)) - present:
                self.connect(Peer([worker], f"late {worker} {self._numbers}".encode()))
            self.settle()
            self.pass_time(0.5)
        assert self.finished == (ExitCode.OK, "the run is complete"), self.finished
        return self.outcome()

    def outcome(self) -> tuple[NDArray[np.float32], NDArray[np.float64], list[Any]]:
        engine = self.federation.engine
        losses = [(outcome.step.position, outcome.losses.tolist()) for outcome, _ in self.appended]
        return engine.model.numpy().copy(), engine.dual_weights.copy(), losses


def ended(config: Config, *, resumes_at: Position | None = None) -> World:
    """A run to its end, put back once to its last checkpoint."""
    world = World(config)
    world.start()
    world.settle()
    peers = [Peer((worker,), bytes([65 + worker])) for worker in range(3)]
    for peer in peers:
        world.connect(peer)
    while world.finished is None:
        if world.federation.engine.step.position == resumes_at:
            world.die_and_resume()
            world.complete()
            break
        assert any([*map(world.say, peers), world.answer()])
    assert world.finished is not None
    assert world.finished[0] is ExitCode.OK, world.finished
    return world


def _own(outcome: Outcome) -> Outcome:
    """The same, in memory of its own, as a disk has it."""
    return replace(
        outcome,
        losses=outcome.losses.copy(),
        payload=outcome.payload and outcome.payload.copied(),
        unsent={name: array.copy() for name, array in outcome.unsent.items()},
    )


def names(lines: Iterable[effects.Log]) -> list[str]:
    """The events of lines."""
    return [line.event.name for line in lines]
