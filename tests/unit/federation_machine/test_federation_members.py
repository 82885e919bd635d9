"""Who is welcomed, cut, asked, paused and refused when several processes come and go."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from federation_world import ANYBODY, Peer, World, config_of, names

from afl._version import __version__
from afl.core.messages import (
    NOWHERE,
    FailureCause,
    GoodbyeStatus,
    Kind,
    PayloadHeader,
    Position,
    Report,
    Role,
)
from afl.errors import ExitCode
from afl.security.identity import Grant, Permission, WorkerIds
from afl.wire.frames import PROTOCOL
from afl_server.federation import effects, events
from afl_server.federation.downlink import Downlink
from afl_server.federation.members import RETURN_S
from afl_server.federation.membership import PROBE_TIMEOUT_S

FIRST = Position(1, 0)
FEDAVG: dict[str, Any] = {"name": "fedavg", "rounds": 4, "eta_w": 0.1, "local_steps": 2}


def world_of(state: str = "off", workers: int = 3, dim: int = 2000, **algorithm: Any) -> World:
    config = config_of(
        workers=workers,
        state=state,
        algorithm=algorithm or FEDAVG,
        task={"name": "synthetic", "batch_size": 8, "options": {"dim": dim}},
    )
    world = World(config)
    world.start()
    world.settle()
    return world


def joined(world: World, *workers: int, process: bytes = b"A", ready: bool = True) -> Peer:
    peer = world.connect(Peer(workers, process))
    if ready:
        world.handle(peer.said.popleft())
        peer.said.clear()
    return peer


def asked(peer: Peer) -> list[list[int]]:
    """The workers that each step queued for the peer asks."""
    steps = [
        (broadcast, workers) for broadcast, workers in peer.steps if broadcast.step.kind is not Kind.MODEL
    ]
    return [
        [worker for worker in workers if worker in broadcast.participants] for broadcast, workers in steps
    ]


def report(world: World, peer: Peer, worker: int, whole: bool = True) -> None:
    """Report the open step; or only the first half of the last payload."""
    world.queue(peer, worker, FIRST, Kind.TRAIN)
    if not whole:
        peer.said.pop()
    while peer.said:
        world.handle(peer.said.popleft())
    if whole:
        peer.reported[worker] = FIRST


def test_a_sum_that_begins_again_cuts_who_was_told_that_its_report_is_held() -> None:
    world = world_of()
    first, second = joined(world, 0), joined(world, 1, process=b"B")
    report(world, second, 1)
    report(world, first, 0, whole=False)
    for peer in (first, second):
        world.leave(peer)
    newcomer = joined(world, 0, process=b"C", ready=False)
    second.applied = FIRST
    returned = world.connect(second)
    assert returned.held == {1}
    world.say(newcomer)
    engine = world.federation.engine
    assert (engine.restarts, engine.holds(1)) == (1, False)
    assert returned.goodbye is GoodbyeStatus.TRY_LATER
    assert newcomer.goodbye is None
    assert asked(newcomer) == [[0]]


def test_who_was_told_that_its_report_is_held_is_asked_if_the_sum_begins_again() -> None:
    """Two workers of one process, of which one has lost its journal."""
    world = world_of()
    first, second = joined(world, 0), joined(world, 1, process=b"B")
    report(world, second, 1)
    report(world, first, 0, whole=False)
    for peer in (first, second):
        world.leave(peer)
    both = joined(world, 0, 1, process=b"C", ready=False)
    assert both.held == {1}
    both.reported = {0: NOWHERE, 1: FIRST}
    both.said.clear()
    world.handle(world.ready(both))
    assert world.federation.engine.restarts == 1
    assert asked(both) == [[0, 1]]


def test_who_has_reported_is_not_asked_again() -> None:
    world = world_of()
    peer = joined(world, 0, 2)
    world.leave(peer)
    for reported, expected in (({0: FIRST, 2: NOWHERE}, [[2]]), ({0: FIRST, 2: FIRST}, [])):
        peer.applied, peer.reported = FIRST, dict(reported)
        world.connect(peer)
        peer.said.clear()
        world.handle(world.ready(peer))
        assert asked(peer) == expected
        world.leave(peer)


def test_who_is_not_drawn_for_the_losses_is_told_that_its_models_counted() -> None:
    world = world_of(name="drfa", rounds=8, eta_w=0.1, eta_q=0.1, sampled=1, local_steps=2, dim=20)
    receipts: list[tuple[int, int]] = []
    undrawn: list[tuple[int, int]] = []
    peers = [joined(world, worker, process=b"%d" % worker) for worker in range(3)]
    handle = world.federation.handle

    def noted(event: events.Event, now: float) -> list[effects.Effect]:
        wanted = handle(event, now)
        for effect in wanted:
            if isinstance(effect, effects.Send):
                frame = world_frame(effect)
                assert all(not ack.reason for ack in frame.acks)
                receipts.extend((ack.worker, ack.position.round) for ack in frame.acks)
        return wanted

    world.federation.handle = noted  # type: ignore[method-assign]
    engine = world.federation.engine
    for round_ in range(1, 4):
        trained = set(engine.participants)
        while engine.step.position != Position(round_, 1):
            assert sum(world.say(peer) for peer in peers)
        undrawn += [(worker, round_) for worker in sorted(trained - set(engine.participants))]
        while engine.step.position.round == round_:
            assert sum(world.say(peer) for peer in peers)
    assert undrawn, "the seed draws some who train and not measure"
    assert sorted(receipts)[: len(undrawn)] == sorted(undrawn)


def world_frame(effect: effects.Send) -> Any:
    from afl.v1 import federation_pb2 as pb  # noqa: PLC0415

    return pb.ServerFrame.FromString(effect.frame.data)


def test_the_worker_whose_turn_it_is_is_read_whatever_waits() -> None:
    world = world_of(name="drfa", rounds=4, eta_w=0.1, eta_q=0.1, local_steps=2)
    peers = [joined(world, worker, process=b"%d" % worker) for worker in range(3)]
    limit = world.config.server.reorder_buffer
    collector = world.federation.engine.collector

    def said(worker: int, snapshot: bool) -> None:
        """The end model, or the snapshot that follows it."""
        parts = world.report(worker, FIRST, Kind.TRAIN)
        wanted = parts[3:] if snapshot else parts[:3]
        for event in wanted:
            values = {name: getattr(event, name) for name in type(event).__dataclass_fields__}
            world.handle(type(event)(**{**values, "member": peers[worker].member}))

    said(2, False)
    said(2, True)
    said(1, False)
    # Worker 0's end model closes worker 1's; then worker 0's snapshot opens worker 1's.
    said(0, False)
    assert collector.waiting_bytes > limit
    assert peers[0].member not in world.paused
    assert peers[1].member in world.paused
    said(0, True)
    assert collector.waiting_bytes > limit
    assert peers[1].member not in world.paused


def test_a_paused_worker_is_not_taken_for_gone() -> None:
    world = world_of(dim=6000)
    owner = joined(world, 1)
    report(world, owner, 1, whole=False)
    assert owner.member in world.paused
    rival = joined(world, 1, process=b"B", ready=False)
    assert rival.goodbye is GoodbyeStatus.REFUSED
    assert owner.goodbye is None
    world.pass_time(world.config.server.peer_timeout + 5)
    assert owner.goodbye is None, "its silence is the server's own doing"


def test_who_answers_keeps_its_worker_and_who_is_silent_loses_it() -> None:
    world = world_of(dim=20)
    owner = joined(world, 0, process=b"owner")
    rival = joined(world, 0, process=b"rival", ready=False)
    assert owner.said, "it is asked"
    assert rival.goodbye is None
    world.say(owner)
    assert rival.goodbye is GoodbyeStatus.REFUSED
    assert owner.goodbye is None

    other = joined(world, 0, process=b"other", ready=False)
    world.pass_time(PROBE_TIMEOUT_S - 0.1)
    assert (owner.goodbye, other.is_welcome) == (None, False)
    world.pass_time(0.2)
    assert owner.goodbye is GoodbyeStatus.TRY_LATER
    assert other.is_welcome
    assert "replaced" in names(world.log)


def test_of_two_newcomers_for_a_silent_process_the_second_meets_the_first() -> None:
    world = world_of(dim=20)
    joined(world, 0, process=b"silent")
    quick, late = (joined(world, 0, process=process, ready=False) for process in (b"quick", b"late"))
    world.pass_time(PROBE_TIMEOUT_S + 0.1)
    assert quick.is_welcome
    assert quick.goodbye is None
    assert late.goodbye is GoodbyeStatus.REFUSED


def test_a_newcomer_need_not_wait_for_who_has_left() -> None:
    world = world_of(dim=20)
    owner = joined(world, 0, process=b"owner")
    rival = joined(world, 0, process=b"rival", ready=False)
    world.leave(owner)
    assert rival.is_welcome


def test_the_same_process_replaces_its_own_stream() -> None:
    world = world_of(dim=20)
    old = joined(world, 0, process=b"same")
    back = joined(world, 0, process=b"same", ready=False)
    assert old.goodbye is GoodbyeStatus.TRY_LATER
    assert back.is_welcome


def test_who_waits_for_a_process_that_comes_back_is_refused() -> None:
    world = world_of(dim=20)
    old = joined(world, 0, 1, process=b"same")
    rival = joined(world, 0, process=b"rival", ready=False)
    back = joined(world, 0, 1, process=b"same", ready=False)
    assert old.goodbye is GoodbyeStatus.TRY_LATER
    assert rival.goodbye is GoodbyeStatus.REFUSED
    assert not rival.is_welcome
    assert back.is_welcome


def test_a_worker_that_is_taken_while_another_s_owner_is_asked_for() -> None:
    world = world_of(dim=20)
    joined(world, 1, process=b"silent")
    both = joined(world, 0, 1, process=b"both", ready=False)
    quick = joined(world, 0, process=b"quick")
    assert quick.is_welcome, "nobody speaks for it yet"
    world.pass_time(PROBE_TIMEOUT_S + 0.1)
    assert quick.goodbye is None
    assert not both.is_welcome, "the other worker's owner is asked next"
    world.say(quick)
    assert both.goodbye is GoodbyeStatus.REFUSED


def test_how_long_a_worker_has_been_missing() -> None:
    world = world_of(workers=2, dim=20)
    snapshot = world.federation.snapshot
    world.leave(joined(world, 0, process=b"never ready", ready=False))
    assert snapshot().lost_at == {}
    world.leave(joined(world, 0, process=b"first"))
    lost_at = world.now
    world.pass_time(3)
    # One that comes and does not get ready does not make the worker less missing.
    world.leave(joined(world, 0, process=b"second", ready=False))
    assert snapshot().lost_at == {0: lost_at}
    third = joined(world, 0, process=b"third")
    assert snapshot().lost_at == {}
    world.pass_time(2)
    world.leave(third)
    assert snapshot().lost_at == {0: world.now}


def test_the_end_waits_for_workers_that_are_expected_back() -> None:
    world = world_of(state="process", workers=1, dim=20)
    peer = world.connect(Peer([0], b"A"))
    while world.finished is None:
        if world.federation.engine.finished and peer.member in world.peers:
            world.leave(peer)
        assert world.answer() or world.say(peer)
    assert not world.released
    world.pass_time(RETURN_S - 4)
    back = joined(world, 0, process=b"B", ready=False)
    assert back.goodbye is GoodbyeStatus.FINISHED
    world.leave(back)
    assert world.released


@pytest.mark.parametrize(
    ("state", "status"), [("process", GoodbyeStatus.LEAVING), ("off", GoodbyeStatus.ABORTED)]
)
def test_who_comes_as_the_server_leaves_hears_what_the_others_heard(
    state: str, status: GoodbyeStatus
) -> None:
    """Of a server that will go on, a worker that comes back at once must not hear that the run is over."""
    world = world_of(state=state, dim=20)
    present = joined(world, 0)
    world.handle(events.StopAsked("a good reason"))
    world.settle()
    assert world.finished == (ExitCode.INTERRUPTED, "a good reason")
    assert present.goodbye is status
    assert joined(world, 0, process=b"A", ready=False).goodbye is status
    assert joined(world, 1, process=b"B", ready=False).goodbye is status


def test_a_step_waits_for_all_for_ever() -> None:
    world = world_of(dim=20)
    for worker in range(3):
        peer = joined(world, worker, process=b"%d" % worker)
        if worker:
            report(world, peer, worker)
    world.pass_time(1e4)
    assert world.finished is None
    assert world.federation.engine.step.position == FIRST
    assert world.federation.engine.missing() == [0]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_server_that_is_stopped_waits_for_its_step_while_all_of_it_are_there(is_there: bool) -> None:
    world = world_of(state="process", dim=20)
    peers = [joined(world, worker, process=b"%d" % worker) for worker in range(3)]
    if not is_there:
        world.leave(peers[2])
    world.handle(events.StopAsked("stopped"))
    while world.answer():
        pass
    if is_there:
        assert world.finished is None
        world.pass_time(world.config.server.grace - 0.1)
        assert world.finished is None
        world.pass_time(0.2)
        world.settle()
    assert world.finished == (ExitCode.INTERRUPTED, "stopped")
    assert "final" in world.models


@pytest.mark.parametrize("policy", ["restart", "refuse"])
def test_a_worker_that_is_ahead_of_the_server_continues_or_is_refused(policy: str) -> None:
    uplink = {"name": "top-k", "ratio": 0.5}
    algorithm = {"name": "afl-com", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1, "uplink": uplink}
    world = World(config_of(algorithm=algorithm, faults={"lost_residual": policy}))
    world.start()
    world.settle()
    peer = Peer([0], b"A")
    peer.reported[0] = Position(3, 0)
    world.connect(peer)
    world.handle(peer.said.popleft())
    refused = policy == "refuse"
    assert peer.goodbye is (GoodbyeStatus.REFUSED if refused else None)
    assert ("worker_ahead" in names(world.log)) is not refused
    assert world.federation.counters.lost_residuals == (0 if refused else 1)
    if refused:
        assert "worker 0 comes back ahead of this server" in world.log[-1].message
    else:
        sent = [(broadcast.step.kind, workers) for broadcast, workers in peer.steps]
        assert sent[0] == (Kind.MODEL, (0,))


def test_nobody_tells_of_another_s_failure() -> None:
    """A failure that is not finite ends the run: it must be the worker's own."""
    world = world_of(dim=20)
    peer = joined(world, 0)
    world.handle(events.FailureTold(peer.member, 1, FIRST, FailureCause.NON_FINITE, "a lie", ""))
    assert peer.goodbye is GoodbyeStatus.REFUSED
    (refused,) = world.log[-1:]
    assert "a failure of worker 1, which is not one of this session's" in refused.message
    assert world.finished is None
    assert world.federation.counters.failures == 0


def test_whoever_may_not_speak_for_a_worker_neither_takes_it_nor_hears_the_end() -> None:
    world = world_of(dim=20)
    stranger = Permission(grants=(Grant("certificate", WorkerIds.parse("2")),))
    owner = joined(world, 0)
    impostor = world.connect(Peer([0], b"B"), stranger)
    assert impostor.goodbye is GoodbyeStatus.REFUSED
    assert owner.goodbye is None
    unknown = world.connect(Peer([0], b"C"), Permission("no token"))
    assert unknown.goodbye is GoodbyeStatus.REFUSED or "no token" in world.log[-1].message
    assert world.federation.snapshot().sessions == 2
    world.handle(events.StopAsked("over", ExitCode.ABORTED, is_final=True))
    late = world.connect(Peer([1], b"B"), stranger)
    assert late.goodbye is GoodbyeStatus.REFUSED


def test_a_permission_that_is_taken_away_ends_the_session() -> None:
    world = world_of(dim=20)
    peer = joined(world, 0)
    world.handle(events.PermissionChanged(peer.member, ANYBODY))
    assert peer.goodbye is None
    world.handle(events.PermissionChanged(peer.member, Permission("the token is unknown")))
    assert peer.goodbye is GoodbyeStatus.REFUSED
    assert joined(world, 0, process=b"B", ready=False).is_welcome


def test_a_stream_without_a_join_and_a_silent_one_are_ended() -> None:
    world = world_of(dim=20)
    server = world.config.server
    silent = Peer([0], b"A")
    silent.member = world.open()
    world.peers[silent.member] = silent
    world.pass_time(server.handshake_timeout - 0.1)
    assert silent.goodbye is None
    world.pass_time(0.2)
    assert silent.goodbye is GoodbyeStatus.REFUSED
    peer = joined(world, 1, process=b"B")
    world.pass_time(server.peer_timeout + server.heartbeat + 0.1)
    assert peer.goodbye is GoodbyeStatus.TRY_LATER
    assert "peer_timeout" in names(world.log)


def test_who_takes_nothing_is_cut_off_and_its_worker_is_free() -> None:
    world = world_of(dim=20)
    peer = joined(world, 0)
    world.handle(events.NotReading(peer.member))
    assert world.hung_up == [peer.member]
    world.leave(peer)
    assert joined(world, 0, process=b"B", ready=False).is_welcome


def test_a_server_that_holds_enough_sessions_turns_others_away() -> None:
    world = World(config_of(state="off", server={"max_sessions": 3}))
    world.start()
    for worker in range(3):
        joined(world, worker, process=b"%d" % worker)
    late = world.open()
    assert world.federation.snapshot().sessions == 3
    assert "as many as server.max_sessions allows" in world.log[-1].message
    world.handle(events.Left(late))


# Faults of the server.


def test_a_step_that_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(workers=1, dim=20)
    peer = joined(world, 0)

    def fails() -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(world.federation.engine, "advance", fails)
    report(world, peer, 0)
    assert world.finished is not None
    assert world.finished[0] is ExitCode.INTERNAL
    (line,) = [line for line in world.log if line.event.name == "step_failed"]
    assert isinstance(line.error, RuntimeError)
    assert peer.goodbye is GoodbyeStatus.ABORTED


def test_a_session_that_a_fault_of_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(dim=20)
    peer = joined(world, 0)

    def fails(report: Report) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(world.federation.engine, "begin_report", fails)
    report(world, peer, 0)
    assert (peer.goodbye, world.finished) == (GoodbyeStatus.TRY_LATER, None)
    assert [isinstance(line.error, RuntimeError) for line in world.log if line.event.name == "session_broke"]


def test_a_fault_that_comes_again_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(dim=20)

    def fails(report: Report) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(world.federation.engine, "begin_report", fails)
    for _ in range(3):
        report(world, joined(world, 0), 0)
    lines = [line for line in world.log if line.event.name == "session_broke"]
    assert [line.error is not None for line in lines] == [True, False, False]
    assert "broke, as before: RuntimeError: out of luck" in lines[1].message


@pytest.mark.parametrize("state", ["process", "off"])
@pytest.mark.parametrize("of", [MemoryError, KeyError])
def test_who_cannot_be_brought_up_for_a_fault_of_the_server_s(
    of: type[Exception], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that comes back would find the same: the server ends, and lack of memory leaves what can go on."""
    world = world_of(state=state, dim=20)

    def fails(_: Downlink) -> None:
        raise of("no luck")

    monkeypatch.setattr(Downlink, "_model_broadcast", fails)
    peer = joined(world, 0)
    is_lack = of is MemoryError
    assert world.finished is not None
    assert world.finished[0] is (ExitCode.SHORTAGE if is_lack else ExitCode.INTERNAL)
    (line,) = [line for line in world.log if line.event.name == "step_failed"]
    assert (line.error is None) == is_lack
    may_go_on = is_lack and state == "process"
    assert peer.goodbye is (GoodbyeStatus.LEAVING if may_go_on else GoodbyeStatus.ABORTED)


def test_lack_of_memory_in_a_report_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(dim=20)
    peer = joined(world, 0)

    def fails(report: Report) -> None:
        raise MemoryError

    monkeypatch.setattr(world.federation.engine, "begin_report", fails)
    report(world, peer, 0)
    assert world.finished is not None
    assert world.finished[0] is ExitCode.SHORTAGE
    assert world.finished[1].startswith("the server ran out of memory: MemoryError")


def test_a_fault_around_the_machine_ends_the_server_also_while_a_job_waits() -> None:
    world = world_of(state="process", workers=1, dim=20)
    peer = joined(world, 0)
    report(world, peer, 0)
    world.handle(events.Faulted(MemoryError()))
    assert world.finished == (ExitCode.SHORTAGE, "the server ran out of memory: MemoryError")
    world.settle()
    assert not [line for line in world.log if line.error]


@pytest.mark.parametrize("code", [ExitCode.STORAGE, ExitCode.INTERNAL])
def test_a_model_that_cannot_be_written_ends_the_run(code: ExitCode) -> None:
    world = world_of(dim=20)
    error = RuntimeError("out of luck") if code is ExitCode.INTERNAL else None
    world.handle(events.WriteFailed("model", "model-best cannot be written", code, error))
    assert world.finished == (code, "model-best cannot be written")
    (line,) = [line for line in world.log if line.event.name == "disk_failed"]
    assert line.error is error


@pytest.mark.parametrize("is_final", [False, True], ids=["full", "gone"])
@pytest.mark.parametrize("what", ["outcome", "metrics", "model"])
def test_a_disk_that_takes_no_more_ends_the_server_before_anybody_hears_of_the_step(
    what: Any, is_final: bool
) -> None:
    """Workers wait for the next server, unless there is no run that it could resume."""
    world = world_of(state="process", workers=1, dim=20)
    peer = joined(world, 0)
    peer.steps.clear()
    report(world, peer, 0)
    if what == "outcome":
        world.fail(is_final=is_final)
        assert not peer.steps
    else:
        world.handle(events.WriteFailed(what, "the disk is full", is_final=is_final))
    world.settle()
    assert world.finished == (ExitCode.STORAGE, "the disk is full")
    assert peer.goodbye is (GoodbyeStatus.ABORTED if is_final else GoodbyeStatus.LEAVING)


def test_a_beginning_that_cannot_be_written_ends_the_run() -> None:
    world = World(config_of())
    world.start()
    world.fail()
    assert world.finished == (ExitCode.STORAGE, "the disk is full")


# Late reports.


def test_who_is_late_is_told_so_and_then_sent_the_open_step() -> None:
    config = config_of(
        state="off",
        algorithm=FEDAVG,
        faults={"stragglers": {"policy": "skip", "deadline": 5, "quorum": 0.5}},
    )
    world = World(config)
    world.start()
    peers = [joined(world, worker, process=b"%d" % worker) for worker in range(3)]
    late_parts = world.report(2, FIRST, Kind.TRAIN)
    for peer in peers:
        peer.steps.clear()
    report(world, peers[0], 0)
    report(world, peers[1], 1)
    world.pass_time(5.1)
    engine = world.federation.engine
    assert engine.step.position > FIRST
    assert asked(peers[0]) == [[0]]
    assert not peers[2].steps, "who owes a report is sent no other step"
    began = late_parts[0]
    assert isinstance(began, events.ReportBegan)
    world.handle(events.ReportBegan(peers[2].member, began.report))
    assert asked(peers[2]) == [[2]]
    assert world.federation.counters.late_reports == 1
    assert "absent" in names(world.log)


def test_a_worker_reports_its_own_only() -> None:
    world = world_of(dim=20)
    peer = joined(world, 0)
    began = world.report(0, FIRST, Kind.TRAIN)[0]
    assert isinstance(began, events.ReportBegan)
    header = PayloadHeader(Role.ITERATE, began.report.payloads[0].encoding, 20, 20, 80)
    world.handle(events.ReportBegan(peer.member, Report(1, FIRST, 1.0, 8, (header,))))
    assert peer.goodbye is GoodbyeStatus.REFUSED
    assert "worker 1 is not one of this session's" in world.log[-1].message


def skipping(**changes: Any) -> World:
    faults = {"non_finite": "skip", "stragglers": {"policy": "skip", "deadline": 5, "quorum": 0.5}}
    world = World(config_of(algorithm=FEDAVG, **{"faults": faults, **changes}))
    world.start()
    world.settle()
    return world


def test_a_late_report_is_answered_once_the_step_is_durable() -> None:
    """A server that dies before that goes on with the step open, and wants the report."""
    world = skipping()
    peers = [joined(world, worker, process=b"%d" % worker) for worker in range(3)]
    report(world, peers[0], 0)
    report(world, peers[1], 1)
    report(world, peers[2], 2, whole=False)
    world.pass_time(5.1)
    assert isinstance(world.work[0], effects.Append)
    assert not world.late
    world.answer()
    assert world.late == {(2, FIRST)}
    assert world.federation.counters.late_reports == 1


def test_who_is_late_for_a_step_that_could_not_be_written_is_not_told_so() -> None:
    world = skipping()
    peers = [joined(world, worker, process=b"%d" % worker) for worker in range(3)]
    report(world, peers[0], 0)
    report(world, peers[1], 1)
    report(world, peers[2], 2, whole=False)
    world.pass_time(5.1)
    world.fail()
    world.settle()
    assert world.finished == (ExitCode.STORAGE, "the disk is full")
    assert not world.late


def test_a_report_that_is_not_finite_is_left_out_once_however_often_it_comes() -> None:
    world = skipping(state="off")
    peer = joined(world, 0)
    whole, (began, half, *_) = (world.report(0, FIRST, Kind.TRAIN) for _ in range(2))
    assert isinstance(began, events.ReportBegan)
    assert isinstance(half, events.Piece)
    world.handle(events.ReportBegan(peer.member, began.report))
    world.handle(events.Piece(peer.member, 0, 0, 0, half.data))
    infinite = replace(began.report, loss=math.inf)
    for _ in range(2):
        world.handle(events.ReportBegan(peer.member, infinite))
    engine = world.federation.engine
    assert engine.report(0).missing
    assert engine.incoming_header(0) is None, "the rest of the other is not wanted"
    for piece in whole[2:]:
        assert isinstance(piece, events.Piece)
        world.handle(events.Piece(peer.member, 0, piece.payload, piece.offset, piece.data))
    assert engine.report(0).missing
    assert names(world.log).count("non_finite") == 1


def test_a_permission_that_is_taken_away_while_an_owner_is_asked() -> None:
    world = world_of(dim=20)
    joined(world, 0, process=b"silent")
    rival = joined(world, 0, process=b"rival", ready=False)
    world.handle(events.PermissionChanged(rival.member, Permission("the token is unknown")))
    assert rival.goodbye is GoodbyeStatus.REFUSED
    world.pass_time(PROBE_TIMEOUT_S + 0.1)
    assert not rival.is_welcome


def closing(world: World, peer: Peer) -> None:
    """The last report of a step has come, and its outcome is being written."""
    report(world, peer, 0)
    assert isinstance(world.work[0], effects.Append)


def test_an_answer_counts_that_comes_after_its_time_while_a_step_is_being_written() -> None:
    world = world_of(state="process", workers=2, dim=20)
    first, second = joined(world, 0), joined(world, 1, process=b"B")
    report(world, second, 1)
    rival = joined(world, 1, process=b"rival", ready=False)
    closing(world, first)
    world.pass_time(PROBE_TIMEOUT_S + 0.1)
    world.handle(events.GoodbyeSaid(second.member, "alive"))
    world.answer()
    assert rival.goodbye is GoodbyeStatus.REFUSED
    assert second.goodbye is None
    assert "replaced" not in names(world.log)


def test_a_join_counts_that_comes_as_a_step_is_being_written() -> None:
    world = world_of(state="process", workers=1, dim=20)
    first = joined(world, 0)
    slow = Peer([0], b"slow")
    slow.member = world.open()
    world.peers[slow.member] = slow
    closing(world, first)
    world.pass_time(world.config.server.handshake_timeout)
    world.handle(events.FrameCame(slow.member, 50, has_join=True))
    world.handle(events.Joined(slow.member, slow.workers, slow.incarnation, PROTOCOL, __version__))
    world.answer()
    assert slow.goodbye is None
    assert first.said, "it is asked whether it is alive"


def test_who_has_been_ended_keeps_no_worker_by_what_it_had_sent_before() -> None:
    world = world_of(dim=20)
    owner = joined(world, 0, process=b"owner")
    world.handle(events.Malformed(owner.member, "nonsense"))
    assert owner.goodbye is GoodbyeStatus.REFUSED
    newcomer = joined(world, 0, process=b"newcomer", ready=False)
    world.handle(events.FrameCame(owner.member, 4))
    assert newcomer.goodbye is None
    world.leave(owner)
    assert newcomer.is_welcome


def test_a_stream_that_has_ended_is_not_paused() -> None:
    world = world_of(dim=6000)
    owner = joined(world, 1)
    report(world, owner, 1, whole=False)
    world.handle(events.NotReading(owner.member))
    assert owner.member not in world.paused
    rival = joined(world, 1, process=b"B", ready=False)
    assert rival.goodbye is None
    world.leave(owner)
    assert rival.is_welcome


def test_a_run_that_is_complete_is_not_stopped_while_its_model_is_written() -> None:
    world = world_of(state="process", workers=1, dim=20)
    peer = world.connect(Peer([0], b"A"))
    engine = world.federation.engine
    while not (engine.finished and isinstance(world.work[-1], effects.Checkpoint)):
        assert world.answer() or world.say(peer)
    # The checkpoint is written first.
    world.work.rotate(1)
    world.answer()
    world.handle(events.StopAsked("a good reason"))
    world.leave(peer)
    world.settle()
    assert world.finished == (ExitCode.OK, "the run is complete")
