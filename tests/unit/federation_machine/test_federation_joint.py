"""Joint reports at the federation: who may send one, how it is counted, and what becomes of half of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from federation_world import Peer, World, config_of, names

from afl.core.messages import NOWHERE, GoodbyeStatus, Kind, Position, Share
from afl.v1 import federation_pb2 as pb
from afl_server.federation import events
from afl_server.federation.membership import _expectation

FIRST = Position(1, 0)
INTEGERS = {
    "name": "afl-com",
    "rounds": 4,
    "eta_w": 0.1,
    "eta_q": 0.1,
    "uplink": {"name": "identity", "bits": 4},
}
SKIP = {"stragglers": {"policy": "skip", "deadline": 5, "quorum": 0.25}}


def world_of(**changes: Any) -> World:
    world = World(config_of(workers=4, state="off", **{"algorithm": INTEGERS, **changes}))
    world.start()
    world.settle()
    return world


def joined(world: World, *workers: int, process: bytes = b"A", reported: Position = NOWHERE) -> Peer:
    """A process that has become ready, and said nothing else yet."""
    peer = Peer(workers, process)
    peer.reported = dict.fromkeys(workers, reported)
    world.connect(peer)
    world.handle(peer.said.popleft())
    return peer


def say(world: World, peer: Peer, *, pieces: int = 2) -> None:
    """The report that is queued, up to so many pieces of its payload."""
    for _ in range(1 + pieces):
        world.handle(peer.said.popleft())
    peer.said.clear()


def expectation(world: World, worker: int) -> pb.Expectation:
    """What a Welcome would say now."""
    return _expectation(world.federation.engine, worker, pb.Position())


def test_one_report_counts_for_all_its_workers_and_its_payload_once() -> None:
    world = world_of()
    peer = joined(world, 0, 1, 3)
    world.queue_all(peer, (0, 1, 3), FIRST, Kind.TRAIN)
    began = peer.said[0]
    assert isinstance(began, events.ReportBegan)
    (header,) = began.report.payloads
    say(world, peer)
    federation = world.federation
    assert federation.engine.missing() == [2]
    assert federation.counters.uplink.float_equivalents == header.value_bytes / 4 + 3
    assert all(
        seconds >= 0 for worker, seconds in enumerate(federation.snapshot().report_seconds) if worker != 2
    )


@pytest.mark.parametrize("named", [1, 2])
def test_a_report_for_a_worker_of_another_session_is_refused(named: int) -> None:
    world = world_of()
    peer, other = joined(world, 0, 2), joined(world, 1, process=b"B")
    began = world.report(0, FIRST, Kind.TRAIN)[0]
    assert isinstance(began, events.ReportBegan)
    report = replace(began.report, others=(Share(named, 1.0, 8),))
    world.handle(events.ReportBegan(peer.member, report))
    assert peer.goodbye is GoodbyeStatus.REFUSED
    right = (
        "worker 1 is not one of this session's" if named == 1 else "a payload whose bits is 4; here it is 5"
    )
    assert right in world.log[-1].message
    assert other.goodbye is None
    assert world.federation.engine.missing() == [0, 1, 2, 3]


def test_a_process_that_comes_back_goes_on_with_its_message() -> None:
    world = world_of()
    peer = joined(world, 0, 1, 3)
    world.queue_all(peer, (0, 1, 3), FIRST, Kind.TRAIN)
    say(world, peer, pieces=1)
    told = expectation(world, 0)
    assert (told.offset > 0, list(told.others)) == (True, [1, 3])
    assert expectation(world, 1) == pb.Expectation(worker=1, position=pb.Position())
    world.leave(peer)
    peer.reported = dict.fromkeys(peer.workers, FIRST)
    world.connect(peer)
    world.handle(peer.said.popleft())
    assert [type(event) for event in peer.said] == [events.ReportBegan, events.Piece]
    say(world, peer, pieces=1)
    assert world.federation.engine.missing() == [2]


@pytest.mark.parametrize("workers", [(0,), (1, 3)])
def test_half_a_message_is_lost_when_its_workers_are_parted(workers: tuple[int, ...]) -> None:
    """Who speaks for its first worker alone must not end it for the others."""
    world = world_of()
    peer = joined(world, 0, 1, 3)
    world.queue_all(peer, (0, 1, 3), FIRST, Kind.TRAIN)
    rest = peer.said[2]
    assert isinstance(rest, events.Piece)
    say(world, peer, pieces=1)
    world.leave(peer)
    newcomer = joined(world, *workers, process=b"B", reported=FIRST)
    engine = world.federation.engine
    assert engine.begun(0) == ()
    world.handle(replace(rest, member=newcomer.member, worker=workers[0]))
    assert engine.missing() == [0, 1, 2, 3]
    say(world, newcomer)
    assert engine.missing() == [worker for worker in range(4) if worker not in workers]
    assert newcomer.goodbye is None


def test_half_a_message_is_lost_with_the_journal_of_one_of_its_workers() -> None:
    world = world_of()
    peer = joined(world, 0, 1, 3)
    world.queue_all(peer, (0, 1, 3), FIRST, Kind.TRAIN)
    say(world, peer, pieces=1)
    world.leave(peer)
    newcomer = Peer((0, 1, 3), b"B")
    newcomer.reported = {0: FIRST, 1: FIRST, 3: NOWHERE}
    world.connect(newcomer)
    world.handle(newcomer.said.popleft())
    engine = world.federation.engine
    assert engine.begun(0) == ()
    say(world, newcomer)
    assert engine.missing() == [2, 3]
    while world.say(newcomer):
        pass
    assert engine.missing() == [2], "the one without a journal has been asked again"


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_late_one_is_late_for_all_its_workers(has_begun: bool) -> None:
    world = world_of(faults=SKIP)
    late, quick = joined(world, 0, 1, 3), joined(world, 2, process=b"B")
    world.queue_all(quick, (2,), FIRST, Kind.TRAIN)
    world.queue_all(late, (0, 1, 3), FIRST, Kind.TRAIN)
    late.reported.update(dict.fromkeys(late.workers, FIRST))
    late.steps.clear()
    parts = list(late.said)
    if has_begun:
        world.handle(late.said.popleft())
    say(world, quick)
    world.pass_time(5.1)
    engine = world.federation.engine
    assert engine.step.position > FIRST
    for part in parts[has_begun:]:
        world.handle(part)
    assert world.late == {(worker, FIRST) for worker in (0, 1, 3)}
    assert world.federation.counters.late_reports == 3
    assert late.goodbye is None
    assert late.steps[-1][0].step.position == engine.step.position
    assert "absent" in names(world.log)


def test_messages_are_brought_to_their_end_one_after_the_other_where_too_much_has_begun() -> None:
    world = world_of(task={"options": {"dim": 20_000}})
    groups = ((0, 3), (1,), (2,))
    peers = [joined(world, *workers, process=b"%d" % workers[0]) for workers in groups]
    collector, limit = world.federation.engine.collector, world.config.server.reorder_buffer
    for peer, workers in zip(peers, groups, strict=True):
        world.queue_all(peer, workers, FIRST, Kind.TRAIN)
        for _ in range(2):
            world.handle(peer.said.popleft())
    assert collector.waiting_bytes > 2 * limit
    assert world.paused == {peer.member for peer in peers[1:]}
    world.handle(peers[0].said.popleft())
    assert collector.waiting_bytes > limit
    # How far each has come depends on how long its integers are coded.
    (last,) = [peer for peer in peers[1:] if peer.member in world.paused]
    gone, own = (peers[1], groups[1]) if last is peers[2] else (peers[2], groups[2])
    # What has come of a message outlives its session, but not the process's memory of it.
    world.leave(gone)
    assert world.paused == {last.member}
    newcomer = joined(world, *own, process=b"another")
    assert not world.paused
    world.handle(last.said.popleft())
    assert world.federation.engine.missing() == list(own)
    while world.say(newcomer):
        pass
    assert world.federation.engine.step.position > FIRST
