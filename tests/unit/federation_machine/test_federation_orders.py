"""Random orders of events: whatever comes and goes, the run ends as an undisturbed one does, to the bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from federation_world import ANYBODY, Peer, World, config_of, loss_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from afl._version import __version__
from afl.config import Config
from afl.core.messages import Position, Report
from afl.errors import ExitCode
from afl.security.identity import Grant, Permission, WorkerIds
from afl.wire.frames import PROTOCOL
from afl_server.federation import effects, events, rounds, run
from afl_server.federation.membership import PROBE_TIMEOUT_S

WORKERS = 3

WRITES = effects.Append | effects.Checkpoint | effects.SaveModel

PERMISSIONS = (
    ANYBODY,
    Permission("the token is unknown"),
    Permission(grants=(Grant("certificate", WorkerIds.parse("1")),)),
)

CONFIGS: dict[str, dict[str, Any]] = {
    "afl-br": {"name": "afl-br", "eta_q": 0.1},
    "afl-com": {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "rand-k", "ratio": 0.5}},
    "integers": {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 4}},
    "fedavg": {"name": "fedavg", "local_steps": 2},
    "drfa": {"name": "drfa", "eta_q": 0.1, "local_steps": 2, "sampled": 2},
}


@cache
def config_named(name: str) -> Any:
    return config_of(workers=WORKERS, algorithm={"rounds": 7, "eta_w": 0.1, **CONFIGS[name]})


@cache
def skipping(name: str) -> Any:
    algorithm = {"rounds": 5, "eta_w": 0.1, **CONFIGS[name]}
    stragglers = {"policy": "skip", "deadline": 5, "quorum": 0.5}
    return config_of(workers=WORKERS, algorithm=algorithm, faults={"stragglers": stragglers})


@cache
def undisturbed(name: str) -> tuple[Any, Any, Any]:
    """What a run without faults ends with."""
    world = World(config_named(name))
    world.start()
    for worker in range(WORKERS):
        world.connect(Peer([worker], f"first {worker}".encode()))
    return world.complete()


class Federations(RuleBasedStateMachine):
    """A federation to which everything happens in any order."""

    world_type: type[World] = World

    def _begin(self, config: Any, is_large: bool, hosts: int) -> None:
        self.small, run.INLINE_DIM = run.INLINE_DIM, 0 if is_large else run.INLINE_DIM
        self.config, self.hosts = config, hosts
        self.processes = 0
        self._start()

    def _start(self) -> None:
        self.world = self.world_type(self.config)
        self.world.start()
        for first in range(0, WORKERS, self.hosts):
            self._join(range(first, min(WORKERS, first + self.hosts)))

    def _join(self, workers: Any) -> Peer:
        self.processes += 1
        return self.world.connect(Peer(workers, f"process {self.processes}".encode()))

    def _peer(self, choice: int) -> Peer | None:
        peers = list(self.world.peers.values())
        return peers[choice % len(peers)] if peers else None

    @rule(choice=st.integers(0, 9))
    def a_peer_says_something(self, choice: int) -> None:
        peer = self._peer(choice)
        if peer is not None:
            self.world.say(peer)

    @rule(times=st.integers(1, 30))
    def everybody_says_something(self, times: int) -> None:
        for _ in range(times):
            for peer in list(self.world.peers.values()):
                self.world.say(peer)
            self.world.answer()

    @rule()
    def work_is_done(self) -> None:
        self.world.answer()

    @rule(choice=st.integers(0, 9))
    def a_link_is_cut(self, choice: int) -> None:
        """The process lives on, and comes back with what it knows."""
        peer = self._peer(choice)
        if peer is not None:
            self.world.leave(peer)
            self.world.connect(peer)

    @rule(choice=st.integers(0, 9))
    def a_link_is_cut_unnoticed(self, choice: int) -> None:
        """The process comes back while the server still takes its old stream for open."""
        peer = self._peer(choice)
        if peer is not None and peer.is_welcome:
            del self.world.peers[peer.member]
            self.world.connect(peer)

    @rule(choice=st.integers(0, 9))
    def a_process_is_killed(self, choice: int) -> None:
        peer = self._peer(choice)
        if peer is not None:
            self.world.leave(peer)
            self._join(peer.workers)

    @rule(choice=st.integers(0, 9))
    def somebody_claims_a_worker(self, choice: int) -> None:
        peer = self._peer(choice)
        if peer is not None:
            rival = self._join(peer.workers[:1])
            self.world.pass_time(0.1)
            assert not rival.is_welcome or peer.goodbye is not None or peer.member not in self.world.peers

    @rule(choice=st.integers(0, 9))
    def a_report_comes_twice(self, choice: int) -> None:
        peer = self._peer(choice)
        if peer is None or not peer.is_welcome or peer.goodbye is not None or peer.said:
            return
        engine = self.world.federation.engine
        worker, position = peer.workers[0], engine.step.position
        if peer.reported[worker] == position and engine.holds(worker):
            before = self.world.federation.counters.uplink.float_equivalents
            self.world.queue(peer, worker, position, engine.step.kind)
            while self.world.say(peer):
                pass
            if not self.world.work:
                assert self.world.federation.counters.uplink.float_equivalents == before

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        # Of those that are not there nothing comes; the others have their heartbeats.
        self.world.pass_time(seconds)

    @rule()
    def the_server_is_killed(self) -> None:
        if self.world.checkpoint is None or self.world.finished is not None:
            return
        living = [peer for peer in self.world.peers.values() if peer.goodbye is None]
        self.world.die_and_resume()
        for peer in living:
            self.world.connect(peer)

    @rule()
    def the_server_is_stopped(self) -> None:
        if self.world.checkpoint is None or self.world.finished is not None:
            return
        self.world.handle(events.StopAsked("stopped"))
        self.world.settle()
        self.world.pass_time(self.world.config.server.grace + 1)
        self.world.settle()
        assert self.world.finished is not None
        if self.world.finished[0] is ExitCode.OK:
            return
        assert self.world.finished == (ExitCode.INTERRUPTED, "stopped")
        living = list(self.world.peers.values())
        self.world.die_and_resume()
        for peer in living:
            self.world.connect(peer)

    @rule(settled=st.booleans())
    def the_disk_is_full(self, settled: bool) -> None:
        """The run ends before anybody hears of what is not durable, which the world sees to."""
        world = self.world
        if not world.work or not isinstance(world.work[0], WRITES) or world.finished is not None:
            return
        world.fail()
        world.settle()
        assert world.finished == (ExitCode.STORAGE, "the disk is full")
        if settled:
            world.pass_time(rounds.FAREWELL_TIMEOUT_S + 1)
            assert world.released
        living = list(world.peers.values())
        if world.checkpoint is None:
            self._start()
            return
        world.die_and_resume()
        for peer in living:
            world.connect(peer)

    @rule(choice=st.integers(0, 9), has_frame=st.booleans())
    def nonsense_comes(self, choice: int, has_frame: bool) -> None:
        member = choice % (self.world.federation.counters.sessions + 2)
        if member in self.world.paused:
            return
        if has_frame:
            self.world.handle(events.FrameCame(member, 12))
        self.world.handle(events.Malformed(member, "nonsense"))
        peer = self.world.peers.get(member)
        assert self.world.work or peer is None or peer.goodbye is not None

    @rule(choice=st.integers(0, 9))
    def a_stream_says_nothing(self, choice: int) -> None:
        member = self.world.open()
        if choice % 2:
            self.world.handle(events.Left(member))

    @rule(choice=st.integers(0, 9), worker=st.integers(-1, WORKERS), size=st.sampled_from([0, 24]))
    def a_piece_comes_of_no_report(self, choice: int, worker: int, size: int) -> None:
        peer = self._peer(choice)
        if peer is None or peer.member in self.world.paused:
            return
        if self.world.federation.engine.incoming_header(worker) is None:
            self.world.handle(events.Piece(peer.member, worker, 0, 0, b"1234"))

    @rule(choice=st.integers(0, 9))
    def somebody_joins_twice(self, choice: int) -> None:
        peer = self._peer(choice)
        if peer is not None and peer.member not in self.world.paused:
            self.world.handle(
                events.Joined(peer.member, peer.workers, peer.incarnation, PROTOCOL, __version__)
            )
            assert self.world.work or peer.goodbye is not None

    @rule(choice=st.integers(0, 9), is_cut=st.booleans())
    def a_process_ends_of_itself(self, choice: int, is_cut: bool) -> None:
        peer = self._peer(choice)
        if peer is None:
            return
        if peer.member not in self.world.paused:
            self.world.handle(events.GoodbyeSaid(peer.member, "enough"))
        if is_cut:
            self.world.leave(peer)

    @rule(choice=st.integers(0, 9))
    def somebody_reads_nothing(self, choice: int) -> None:
        peer = self._peer(choice)
        if peer is not None:
            self.world.handle(events.NotReading(peer.member))
            if not self.world.work:
                assert peer.member in self.world.hung_up
                self.world.leave(peer)

    @rule(choice=st.integers(0, 9), permission=st.sampled_from(PERMISSIONS))
    def a_permission_changes(self, choice: int, permission: Permission) -> None:
        peer = self._peer(choice)
        if peer is None:
            return
        self.world.handle(events.PermissionChanged(peer.member, permission))
        if permission.forbids(peer.workers):
            self.world.settle()
            self.world.pass_time(PROBE_TIMEOUT_S + 0.1)
            assert not peer.is_welcome or peer.goodbye is not None

    @invariant()
    def every_step_is_closed_once_and_with_what_was_reported(self) -> None:
        positions = [outcome.step.position for outcome, _ in self.world.appended]
        assert positions == sorted(set(positions))

    @invariant()
    def no_joint_report_is_refused(self) -> None:
        assert not [line.message for line in self.world.log if "joint" in line.message]

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self._end()
        finally:
            run.INLINE_DIM = getattr(self, "small", run.INLINE_DIM)

    def _end(self) -> None:
        """What must hold once the run is complete."""
        raise NotImplementedError


class AnyOrder(Federations):
    """Nobody is left out."""

    @initialize(name=st.sampled_from(sorted(CONFIGS)), is_large=st.booleans(), hosts=st.sampled_from([1, 2]))
    def begin(self, name: str, is_large: bool, hosts: int) -> None:
        self.name = name
        self._begin(config_named(name), is_large, hosts)

    def _end(self) -> None:
        model, weights, losses = (
            self.world.complete() if self.world.finished is None else self.world.outcome()
        )
        right_model, right_weights, right_losses = undisturbed(self.name)
        # As text: a worker that was not asked has no loss, and that is not equal to itself.
        assert repr(losses) == repr(right_losses)
        assert np.array_equal(weights, right_weights)
        assert np.array_equal(model.view(np.uint8), right_model.view(np.uint8))


class LateWorld(World):
    """Takes note of the reports that were said to their ends."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reported: set[tuple[int, Position]] = set()
        self._saying: dict[tuple[int, int], Report] = {}

    def say(self, peer: Peer) -> bool:
        self._take_steps(peer)
        said = peer.said[0] if peer.said else None
        # Whatever is said after the last step is answered by the goodbye.
        is_over = self.federation.engine.finished
        has_said = super().say(peer)
        if isinstance(said, events.ReportBegan) and has_said:
            self._saying[peer.member, said.report.worker] = said.report
        if isinstance(said, events.ReportBegan | events.Piece) and has_said:
            worker = said.report.worker if isinstance(said, events.ReportBegan) else said.worker
            following = peer.said[0] if peer.said else None
            is_whole = not (isinstance(following, events.Piece) and following.worker == worker)
            if is_whole and peer.goodbye is None and not is_over:
                report = self._saying[peer.member, worker]
                self.reported.update((named, report.position) for named in report.workers)
        return has_said

    def _carry_out(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.HangUp) and effect.member in self.peers:
            # What it has said and still waits is dropped; it says that again when it comes back.
            cut_off = self.peers[effect.member].workers
            self.reported = {(worker, at) for worker, at in self.reported if worker not in cut_off}
        super()._carry_out(effect)

    def die_and_resume(self) -> None:
        self.reported.clear()
        super().die_and_resume()


class AnyDelay(Federations):
    """Steps are closed without the late."""

    world_type = LateWorld

    @initialize(name=st.sampled_from(sorted(CONFIGS)), is_large=st.booleans(), hosts=st.sampled_from([1, 2]))
    def begin(self, name: str, is_large: bool, hosts: int) -> None:
        self._begin(skipping(name), is_large, hosts)

    @rule(seconds=st.sampled_from([5.0, 5.5]))
    def a_deadline_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(choice=st.integers(0, 9))
    def one_is_slow(self, choice: int) -> None:
        """All others do what they can, until the deadline."""
        slow = self._peer(choice)
        for _ in range(20):
            for peer in list(self.world.peers.values()):
                if peer is not slow:
                    self.world.say(peer)
            self.world.answer()
        self.world.pass_time(5.1)

    @invariant()
    def steps_have_a_quorum_of_right_reports_none_of_which_was_late(self) -> None:
        for outcome, _ in self.world.appended:
            position = outcome.step.position
            present = [worker for worker, loss in enumerate(outcome.losses) if not np.isnan(loss)]
            is_sampled = self.config.algorithm.name == "drfa" and not outcome.step.kind.is_of_evaluation
            assert len(present) >= (1 if is_sampled else 2)
            for worker in present:
                assert outcome.losses[worker] == loss_of(worker, position)
                assert (worker, position) not in self.world.late

    def _end(self) -> None:
        world = self.world
        assert isinstance(world, LateWorld)
        if world.finished is None:
            world.complete()
        self.steps_have_a_quorum_of_right_reports_none_of_which_was_late()
        counted = {
            (worker, outcome.step.position)
            for outcome, _ in world.appended
            for worker in np.flatnonzero(~np.isnan(outcome.losses)).tolist()
        }
        assert world.reported <= counted | world.late


TestAnyOrder = AnyOrder.TestCase
TestAnyDelay = AnyDelay.TestCase
TestAnyOrder.settings = TestAnyDelay.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
