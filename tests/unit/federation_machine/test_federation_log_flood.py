"""What peers word does not fill the log, nor the server's memory."""

from __future__ import annotations

import json
import time

import pytest
from federation_world import Peer, World, config_of

from afl._version import __version__
from afl.core.messages import GoodbyeStatus, Position
from afl.outside import MOST_OF_REASON, MOST_OF_TRACEBACK, MOST_WORDS
from afl.security.identity import MOST_WORKERS_A_SESSION, Permission
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import PROTOCOL
from afl_server.federation import events
from afl_server.federation.counters import Counters
from afl_server.federation.run import LOG_BURST
from afl_server.network.conversation import Conversation
from afl_server.network.outbox import Outbox

MEGABYTES = "\x1b[2J\u202e" + "ä" * 900_000


@pytest.fixture
def world() -> World:
    world = World(config_of(workers=3, state="off"))
    world.start()
    world.settle()
    world.log.clear()
    return world


def said(*frames: pb.WorkerFrame) -> list[events.MemberEvent]:
    """The last event of each frame."""
    conversation = Conversation(1, Outbox(Counters(), chunk_bytes=4096))
    return [list(conversation.events_of(frame.SerializeToString()))[-1] for frame in frames]


def test_what_a_peer_words_is_cut_as_it_comes() -> None:
    join = pb.Join(workers=[1], package_version=MEGABYTES, task=MEGABYTES, run_id=MEGABYTES)
    failure = pb.Failure(worker=1, message=MEGABYTES, traceback="x" * 100_000 + "\nthe end")
    goodbye = pb.Goodbye(reason=MEGABYTES)
    frames = pb.WorkerFrame(join=join), pb.WorkerFrame(failure=failure), pb.WorkerFrame(goodbye=goodbye)
    joined, failed, left = said(*frames)
    assert isinstance(joined, events.Joined)
    assert isinstance(failed, events.FailureTold)
    assert isinstance(left, events.GoodbyeSaid)
    for text in (joined.package_version, joined.task, joined.run_id, left.reason):
        assert len(text) <= MOST_WORDS
        assert text.startswith("\\x1b[2J\\u202e"), "what is not printable is escaped"
    assert len(failed.message) <= 2 * MOST_OF_REASON
    assert len(failed.traceback) <= 2 * MOST_OF_TRACEBACK
    assert failed.traceback.endswith("\nthe end"), "the end of a traceback says most"


def test_a_join_of_two_million_workers_costs_little() -> None:
    frame = pb.WorkerFrame(join=pb.Join(workers=range(1_900_000)))
    began = time.process_time()
    (event,) = said(frame)
    assert isinstance(event, events.Malformed)
    assert f"{MOST_WORKERS_A_SESSION} are the most" in event.reason
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("task", ["synthetic_" + "x" * 1_900_000, "a" * 1_900_000])
def test_the_name_of_a_task_of_two_megabytes_costs_little(world: World, task: str) -> None:
    join = pb.Join(workers=[1], protocol=PROTOCOL, package_version=__version__, task=task)
    member = world.open()
    began = time.process_time()
    (event,) = said(pb.WorkerFrame(join=join))
    assert isinstance(event, events.Joined)
    world.handle(events.Joined(member, (1,), b"A", PROTOCOL, __version__, task=event.task))
    assert time.process_time() - began < 0.1
    assert len(world.log[-1].message) < 1500


@pytest.mark.parametrize("permission", [Permission(), Permission("nobody")])
def test_refusals_that_are_all_worded_differently_are_few_lines(world: World, permission: Permission) -> None:
    for number in range(2000):
        world.now += 0.001
        member = world.open(permission)
        if not permission.refusal:
            other = f"{number}" + "x" * 290
            world.handle(events.Joined(member, (1,), b"A", 99, other, oldest_protocol=99))
        world.handle(events.Left(member))
    assert world.federation.counters.refused == 2000
    assert 1 <= len(world.log) <= LOG_BURST + 3
    assert len(json.dumps([line.message for line in world.log])) < 60_000
    world.now += 60
    world.open(Permission("nobody"))
    member = world.open()
    world.handle(events.Joined(member, (1,), b"A", 99, "other", oldest_protocol=99))
    left_out = sum(line.event.left_out for line in world.log)  # type: ignore[attr-defined]
    assert left_out + len(world.log) in {2001, 2002}, "each is written, or counted as left out"


def test_each_session_tells_as_many_failures_as_it_has_workers(world: World) -> None:
    peer = world.connect(Peer((1,), b"A"))
    world.handle(peer.said.popleft())
    failure = events.FailureTold(peer.member, 1, Position(1, 0), 0, "it broke", "")
    world.handle(failure)
    assert peer.goodbye is None
    world.handle(failure)
    assert peer.goodbye is GoodbyeStatus.REFUSED
    assert world.federation.counters.failures == 1


def test_failures_and_goodbyes_of_many_sessions_are_few_lines(world: World) -> None:
    traceback = "\n".join(["Traceback", *["    it broke"] * 500])
    for number in range(500):
        world.now += 0.001
        peer = world.connect(Peer((1,), b"A%d" % number))
        world.handle(peer.said.popleft())
        world.handle(events.FailureTold(peer.member, 1, Position(1, 0), 0, f"it broke {number}", traceback))
        world.handle(events.GoodbyeSaid(peer.member, f"reason {number}"))
        world.leave(peer)
    assert world.federation.counters.failures == 500
    assert len(world.log) <= 10 * (LOG_BURST + 2)
    failed = [line for line in world.log if line.event.name == "worker_failed"]
    assert len(failed) <= LOG_BURST + 1
    assert failed[-1].message.endswith("it broke"), "the traceback stays the end"
    # Another worker's are told all the same.
    world.now += 0.001
    other = world.connect(Peer((2,), b"B"))
    world.handle(other.said.popleft())
    world.handle(events.FailureTold(other.member, 2, Position(1, 0), 0, "another", ""))
    assert "another" in world.log[-1].message
