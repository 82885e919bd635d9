"""A step, or a report, whose session was cut goes on where it was; also with another server process."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from federation_world import Peer, World, config_of

from afl.core.messages import NOWHERE, Kind, Position
from afl.errors import ExitCode
from afl.wire.assembler import DIGEST_BYTES
from afl.wire.fast_chunk import lone_chunk_of_server
from afl_server.federation import effects, events
from afl_server.federation.broadcast import Broadcast
from afl_server.federation.events import PartialStep

FIRST = Position(1, 0)
HELD = 40_960


class Following(World):
    """Takes note of where each step that is sent begins."""

    def __init__(self, *arguments: Any) -> None:
        self.followed: list[effects.Follow] = []
        super().__init__(*arguments)

    def _carry_out(self, effect: effects.Effect) -> None:
        if isinstance(effect, effects.Follow):
            self.followed.append(effect)
        super()._carry_out(effect)


def world_of(state: str = "process") -> Following:
    """A model that takes 80 chunks."""
    task = {"name": "synthetic", "batch_size": 8, "options": {"dim": 80_000}}
    world = Following(config_of(workers=1, state=state, task=task))
    world.start()
    world.settle()
    return world


def welcomed(world: Following, peer: Peer, **changes: Any) -> list[effects.Follow]:
    """A process joins and says that it is ready; the steps that it is sent."""
    world.connect(peer)
    ready = peer.said.popleft()
    assert isinstance(ready, events.Ready)
    values = {name: getattr(ready, name) for name in type(ready).__dataclass_fields__}
    world.followed.clear()
    world.handle(events.Ready(**{**values, **changes}))
    while world.answer():
        pass
    return list(world.followed)


def beginning(broadcast: Broadcast, length: int = HELD) -> PartialStep:
    """What a process has that has received so many bytes."""
    chunks = filter(None, (lone_chunk_of_server(frame.data) for frame in broadcast.frames))
    data = b"".join(chunk.data for chunk in chunks)[:length]
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
    return PartialStep(broadcast.step.position, broadcast.step.kind, 0, length, digest)


@pytest.mark.parametrize("length", [4_096, HELD, HELD + 100, 320_000])
def test_a_model_goes_on_where_it_was_cut(length: int) -> None:
    world = world_of()
    peer = Peer([0], b"A")
    model, step = welcomed(world, peer)
    assert (model.broadcast.step.kind, model.first) == (Kind.MODEL, None)
    assert (step.broadcast.step.kind, step.first) == (Kind.TRAIN, None)
    world.leave(peer)
    again, step = welcomed(world, peer, partial=beginning(model.broadcast, length))
    assert (again.broadcast.step.kind, again.first) == (Kind.MODEL, (0, length))
    assert step.first is None


def test_another_server_process_sends_the_rest() -> None:
    world = world_of()
    peer = Peer([0], b"A")
    partial = beginning(welcomed(world, peer)[0].broadcast)
    while world.answer():
        pass
    world.die_and_resume()
    world.settle()
    assert welcomed(world, peer, partial=partial)[0].first == (0, HELD)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": b"x" * DIGEST_BYTES},
        {"position": Position(2, 0)},
        {"kind": Kind.EVALUATE},
        {"offset": HELD + 1},
        {"offset": 1 << 62},
        {"payload": 7},
    ],
)
def test_what_is_not_the_step_s_beginning_is_sent_anew(changes: dict[str, Any]) -> None:
    world = world_of()
    peer = Peer([0], b"A")
    partial = beginning(welcomed(world, peer)[0].broadcast)
    world.leave(peer)
    assert welcomed(world, peer, partial=replace(partial, **changes))[0].first is None


def test_a_process_that_comes_back_with_its_report_is_told_where_to_go_on() -> None:
    world = world_of()
    peer = Peer([0], b"A")
    welcomed(world, peer)
    world.queue(peer, 0, FIRST, Kind.TRAIN)
    for _ in range(2):
        world.handle(peer.said.popleft())
    engine = world.federation.engine
    payload, offset = engine.arrived(0)
    assert (payload, offset) == (0, 160_000)
    world.leave(peer)
    restarted = Peer([0], b"B")
    restarted.reported[0] = FIRST
    world.connect(restarted)
    pieces = [event for event in restarted.said if isinstance(event, events.Piece)]
    assert [(piece.payload, piece.offset) for piece in pieces] == [(0, 160_000)]
    while world.say(restarted) or world.answer():
        pass
    assert (engine.restarts, world.finished) == (0, (ExitCode.OK, "the run is complete"))


def test_a_process_that_comes_back_without_its_report_begins_the_sum_again() -> None:
    world = world_of()
    peer = Peer([0], b"A")
    welcomed(world, peer)
    world.queue(peer, 0, FIRST, Kind.TRAIN)
    for _ in range(2):
        world.handle(peer.said.popleft())
    world.leave(peer)
    welcomed(world, Peer([0], b"B"), reported=((0, NOWHERE),))
    engine = world.federation.engine
    assert (engine.restarts, engine.arrived(0)) == (1, (0, 0))
