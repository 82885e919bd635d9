"""Random orders of events: whatever comes and goes, the run ends as an undisturbed one does, to the bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from federation_world import Peer, World, config_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from afl.errors import ExitCode
from afl_server.federation import events, rounds

WORKERS = 3

CONFIGS: dict[str, dict[str, Any]] = {
    "afl-br": {"name": "afl-br", "eta_q": 0.1},
    "afl-com": {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "rand-k", "ratio": 0.5}},
    "fedavg": {"name": "fedavg", "local_steps": 2},
    "drfa": {"name": "drfa", "eta_q": 0.1, "local_steps": 2, "sampled": 2},
}


@cache
def config_named(name: str) -> Any:
    return config_of(workers=WORKERS, algorithm={"rounds": 7, "eta_w": 0.1, **CONFIGS[name]})


@cache
def undisturbed(name: str) -> tuple[Any, Any, Any]:
    """What a run without faults ends with."""
    world = World(config_named(name))
    world.start()
    for worker in range(WORKERS):
        world.connect(Peer([worker], f"first {worker}".encode()))
    return world.complete()


class AnyOrder(RuleBasedStateMachine):
    """A federation to which everything happens in any order."""

    @initialize(name=st.sampled_from(sorted(CONFIGS)), is_large=st.booleans(), hosts=st.sampled_from([1, 2]))
    def begin(self, name: str, is_large: bool, hosts: int) -> None:
        self.name = name
        self.small, rounds.INLINE_DIM = rounds.INLINE_DIM, 0 if is_large else rounds.INLINE_DIM
        self.world = World(config_named(name))
        self.processes = 0
        self.world.start()
        for first in range(0, WORKERS, hosts):
            self._join(range(first, min(WORKERS, first + hosts)))

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

    @invariant()
    def every_step_is_closed_once_and_with_what_was_reported(self) -> None:
        positions = [outcome.step.position for outcome, _ in self.world.appended]
        assert positions == sorted(set(positions))

    def teardown(self) -> None:
        try:
            if not hasattr(self, "world"):
                return
            model, weights, losses = (
                self.world.complete() if self.world.finished is None else self.world.outcome()
            )
            right_model, right_weights, right_losses = undisturbed(self.name)
            # As text: a worker that was not asked has no loss, and that is not equal to itself.
            assert repr(losses) == repr(right_losses)
            assert np.array_equal(weights, right_weights)
            assert np.array_equal(model.view(np.uint8), right_model.view(np.uint8))
        finally:
            rounds.INLINE_DIM = getattr(self, "small", rounds.INLINE_DIM)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
