"""What a federation does against one worker that reports what it likes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import federation_world
import numpy as np
import pytest
from federation_world import Peer, World, config_of, ended

from afl.core.codecs.integers import integers
from afl.core.messages import FailureCause, GoodbyeStatus, Kind, Payload, PayloadHeader, Position, Report
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.rounds.engine import QUARANTINED
from afl.errors import ExitCode
from afl_server.federation import effects, events
from afl_server.runner.run import quarantine_text

HOSTILE = 2
ALGORITHM: dict[str, Any] = {"name": "afl-br", "rounds": 8, "eta_w": 0.1, "eta_q": 0.1, "block": 100}
RESUMED = Position(6, 0)


def lying(monkeypatch: pytest.MonkeyPatch, loss: float, worker: int = HOSTILE) -> None:
    """The worker reports this loss in rounds 3 and 4."""
    honest = federation_world.loss_of

    def told(of: int, position: Position) -> float:
        return loss if of == worker and position.round in {3, 4} else honest(of, position)

    monkeypatch.setattr(federation_world, "loss_of", told)


def logged(world: World, name: str) -> list[effects.Log]:
    return [line for line in world.log if line.event.name == name]


def weights(world: World) -> bytes:
    return world.federation.engine.dual_weights.tobytes()


@pytest.mark.parametrize(("loss", "counts"), [(1e300, 20.0), (-1e300, -20.0)])
def test_a_loss_beyond_the_cap_counts_as_the_cap(
    loss: float, counts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(algorithm=ALGORITHM, faults={"loss_cap": 20.0})
    with monkeypatch.context() as patch:
        lying(patch, loss)
        capped, resumed = ended(config), ended(config, resumes_at=RESUMED)
    with monkeypatch.context() as patch:
        lying(patch, counts)
        told_the_cap = ended(config_of(algorithm=ALGORITHM))
    assert weights(capped) == weights(told_the_cap) == weights(resumed)
    (line,) = logged(capped, "loss_capped")
    assert line.event.extra == {"event": "loss_capped", "worker": HOSTILE, "round": 3, "loss": loss}
    assert capped.federation.snapshot().incidents["capped_loss"] == [0, 0, 2]
    assert not logged(told_the_cap, "loss_capped")


def test_without_a_cap_one_loss_takes_all_weight_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, 1e300)
    world = ended(config_of(algorithm=ALGORITHM))
    assert world.federation.engine.dual_weights.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("cap", [None, 100.0])
def test_a_loss_far_above_the_others_is_told_when_it_comes_and_when_it_goes(
    cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(monkeypatch, 1e3)
    world = ended(config_of(algorithm=ALGORITHM, faults={"loss_cap": cap}))
    told = [
        (line.event.extra["round"], line.event.extra["workers"]) for line in logged(world, "loss_far_above")
    ]
    assert told == [(3, (HOSTILE,)), (5, ())]
    assert world.federation.snapshot().incidents["high_loss"] == [0, 0, 2]


def test_honest_losses_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three times as high as the others', all along: what a worker unlike the others has.
    lying(monkeypatch, 4.0)
    world = ended(config_of(algorithm=ALGORITHM, faults={"loss_cap": 20.0}), resumes_at=RESUMED)
    assert not logged(world, "loss_far_above")
    assert not logged(world, "loss_capped")
    assert np.isfinite(world.federation.engine.dual_weights).all()


@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHM, {**ALGORITHM, "name": "afl-com", "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 8}}],
)
def test_an_update_that_is_too_large_is_left_out_and_its_worker_told(
    algorithm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = federation_world.payload_of

    def sent(worker: int, position: Position, header: PayloadHeader) -> Payload:
        payload = honest(worker, position, header)
        if worker == HOSTILE and position.round in {1, 4}:
            return payload
        small = np.frombuffer(payload.data, "<f4") * np.float32(1e-3)
        return Payload(header, (small.view(np.uint8).data,))

    if algorithm is ALGORITHM:
        monkeypatch.setattr(federation_world, "payload_of", sent)
    config = config_of(algorithm=algorithm, faults={"update_norm": {"times": 10}})
    world, resumed = ended(config), ended(config, resumes_at=RESUMED)
    told = [line.event.extra for line in logged(world, "update_too_large")]
    expected = [1, 4] if algorithm is ALGORITHM else []
    assert [(entry["worker"], entry["round"]) for entry in told] == [(HOSTILE, round_) for round_ in expected]
    assert all(entry["norm"] > 50 * entry["limit"] for entry in told)
    assert world.federation.snapshot().incidents["large_update"] == [0, 0, len(expected)]
    assert world.federation.counters.refused_reports == len(expected)
    assert weights(world) == weights(resumed)
    one, other = (each.federation.engine.model.numpy().tobytes() for each in (world, resumed))
    assert one == other


SKIPS: dict[str, Any] = {"non_finite": "skip"}


@pytest.mark.parametrize(
    "algorithm",
    [
        ALGORITHM,
        {**ALGORITHM, "name": "afl-com", "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 8}},
        {"name": "fedavg", "rounds": 16, "eta_w": 0.1, "local_steps": 2},
    ],
)
def test_a_worker_in_quarantine_is_left_out_until_it_is_let_out(algorithm: dict[str, Any]) -> None:
    world = World(config_of(algorithm=algorithm, faults=SKIPS))
    world.start()
    world.settle()
    peers = [Peer((worker,), bytes([65 + worker])) for worker in range(3)]
    for peer in peers:
        world.connect(peer)
    engine, seen = world.federation.engine, []
    before: tuple[int, ...] = ()
    while world.finished is None:
        moved = [*map(world.say, peers), world.answer()]
        round_ = engine.step.position.round
        if round_ in {2, 3} and not engine.quarantined and before == ():
            world.handle(events.QuarantineChanged(f"{HOSTILE}\n"))
            before = (HOSTILE,)
        elif round_ == 4 and engine.quarantined:
            world.handle(events.QuarantineChanged(""))
        elif not any(moved):
            raise AssertionError("nobody has anything to do")
        if engine.last_round is not None and (not seen or seen[-1] is not engine.last_round):
            seen.append(engine.last_round)
    assert world.finished[0] is ExitCode.OK, world.finished
    absent = [HOSTILE in summary.absent for summary in seen]
    assert any(absent)
    assert not absent[0]
    assert not absent[-1]
    assert all(set(summary.absent) <= {HOSTILE} for summary in seen)
    assert [line.event.extra["workers"] for line in logged(world, "quarantined")] == [[HOSTILE], []]
    assert not any(world.federation.snapshot().incidents["non_finite"])


@pytest.mark.parametrize(
    ("text", "faults", "why"),
    [
        ("two", SKIPS, "worker ids are written 3, 0-9 or 0-3,7"),
        ("3", SKIPS, "the run's workers are 0 to 2"),
        ("0-999999999", SKIPS, "the run's workers are 0 to 2"),
        ("0,1", SKIPS, r"fewer workers than the quorum \(2\) would be left"),
        ("2", {}, "every step waits for all workers"),
        (None, SKIPS, "it cannot be read"),
    ],
)
def test_a_quarantine_that_cannot_be_kept_is_told_and_changes_nothing(
    text: str | None, faults: dict[str, Any], why: str
) -> None:
    world = World(config_of(algorithm=ALGORITHM, faults=faults))
    world.start()
    world.settle()
    world.handle(events.QuarantineChanged(text))
    (line,) = logged(world, "quarantine_unusable")
    assert re.search(why, line.message)
    assert not world.federation.engine.quarantined
    world.complete()


def test_a_worker_that_never_reports_holds_nobody_up_once_it_is_in_quarantine() -> None:
    world = World(config_of(algorithm=ALGORITHM, faults=SKIPS))
    world.start()
    world.settle()
    peers = [world.connect(Peer((worker,), bytes([65 + worker]))) for worker in range(2)]
    world.settle()
    assert world.federation.engine.missing() == [HOSTILE]
    world.handle(events.QuarantineChanged("2"))
    while any([*map(world.say, peers), world.answer()]):
        pass
    assert world.finished == (ExitCode.OK, "the run is complete")


def test_the_file_is_read_as_it_is(tmp_path: Path) -> None:
    assert quarantine_text(tmp_path) == ""
    file = tmp_path / "quarantine"
    file.write_text("1,3-4\n", encoding="utf-8")
    assert quarantine_text(tmp_path) == "1,3-4\n"
    file.write_bytes(b"1" * (1 << 20) + b"1")
    assert quarantine_text(tmp_path) is None
    file.unlink()
    file.mkdir()
    assert quarantine_text(tmp_path) is None
    file.rmdir()
    os.mkfifo(file)
    assert quarantine_text(tmp_path) is None


@pytest.mark.parametrize("text", ["2\n11\n", "2 11", "2,\n11", " 11 , 2\t", "2\r\n11\r\n"])
def test_ids_may_stand_in_lines_of_their_own(text: str) -> None:
    world = World(config_of(workers=12, algorithm=ALGORITHM, faults=SKIPS))
    world.start()
    world.settle()
    world.handle(events.QuarantineChanged(text))
    assert world.federation.engine.quarantined == {2, 11}


def test_a_run_that_is_resumed_keeps_its_quarantine_until_the_file_says_otherwise() -> None:
    world = World(config_of(algorithm=ALGORITHM, faults=SKIPS))
    world.start()
    world.settle()

    def until(round_: int) -> None:
        peers = [world.connect(Peer((worker,), bytes([65 + worker]))) for worker in range(3)]
        while world.federation.engine.step.position.round < round_:
            assert any([*map(world.say, peers), world.answer()])

    until(3)
    world.handle(events.QuarantineChanged(f"{HOSTILE}"))
    for round_ in (4, 6, 7):
        peers = list(world.peers.values())
        while world.federation.engine.step.position.round < round_:
            assert any([*map(world.say, peers), world.answer()])
        world.die_and_resume()
        assert world.federation.engine.quarantined == {HOSTILE}
        world.handle(events.QuarantineChanged(None))
        assert world.federation.engine.quarantined == {HOSTILE}
        until(round_)
    world.handle(events.QuarantineChanged(""))
    world.complete()
    assert not world.federation.engine.quarantined


JOINT: dict[str, Any] = {
    **ALGORITHM,
    "name": "afl-com",
    "rounds": 10,
    "uplink": {"name": "rand-k", "ratio": 0.5, "bits": 8},
}


@pytest.mark.parametrize("faults", [SKIPS, {"update_norm": {"times": 1000}}])
def test_a_worker_is_left_out_alone_whoever_shares_its_process(faults: dict[str, Any]) -> None:
    """Its report for round 3 is there, or in a sum, when the quarantine comes; in round 6 it is let out."""

    def run(*groups: tuple[int, ...]) -> World:
        world = World(config_of(workers=4, algorithm=JOINT, faults=faults))
        world.start()
        world.settle()
        peers = [world.connect(Peer(workers, bytes([65 + workers[0]]))) for workers in groups]
        engine = world.federation.engine
        while world.finished is None:
            moved = [world.answer()]
            for peer in peers:
                moved.append(world.say(peer))
                round_ = engine.step.position.round
                if round_ == 3 and not engine.quarantined and (len(peer.workers) > 1 or engine.holds(1)):
                    world.handle(events.QuarantineChanged("1"))
                elif round_ == 6 and engine.quarantined:
                    world.handle(events.QuarantineChanged(""))
            assert any(moved)
        assert world.finished[0] is ExitCode.OK, world.finished
        return world

    alone, joint = run((0,), (1,), (2,), (3,)), run((0, 1, 2), (3,))
    for world in (alone, joint):
        absent = [outcome.step.position.round for outcome, _ in world.appended if np.isnan(outcome.losses[1])]
        assert sorted(set(absent)) == [4, 5, 6]
        assert all(np.isfinite(outcome.losses[[0, 2, 3]]).all() for outcome, _ in world.appended)
    assert weights(alone) == weights(joint)
    one, other = (world.federation.engine.model.numpy().tobytes() for world in (alone, joint))
    assert one == other


def test_a_joint_report_that_is_too_large_is_left_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = federation_world.payload_of

    def sent(worker: int, position: Position, header: PayloadHeader) -> Payload:
        payload = honest(worker, position, header)
        if worker == 1 and position.round == 4:
            return payload
        zero = np.zeros(header.count, dtype=np.int32)
        zero[:2] = 1
        return integers(header.encoding, header.bits).whole(zero, header.role, header.dim)

    monkeypatch.setattr(federation_world, "payload_of", sent)
    world = World(config_of(workers=5, algorithm=JOINT, faults={"update_norm": {"times": 10}}))
    world.start()
    world.settle()
    peers = [world.connect(Peer(ids, bytes([65 + ids[0]]))) for ids in ((0, 1), (2,), (3,), (4,))]
    while any([*map(world.say, peers), world.answer()]):
        pass
    assert world.finished == (ExitCode.OK, "the run is complete")
    told = {
        (line.event.extra["worker"], line.event.extra["round"]) for line in logged(world, "update_too_large")
    }
    assert told == {(0, 4), (1, 4)}


def test_a_report_of_one_that_is_not_asked_ends_the_session() -> None:
    world = World(config_of(workers=4, algorithm=JOINT, faults=SKIPS))
    world.start()
    world.settle()
    world.handle(events.QuarantineChanged("1"))
    group, single = (world.connect(Peer(ids, bytes([65 + ids[0]]))) for ids in ((0, 1, 2), (3,)))
    while world.federation.engine.step.position.round < 3:
        assert any([world.say(group), world.say(single), world.answer()])
    group.said.clear()
    world.queue_all(group, [0, 1, 2], world.federation.engine.step.position, Kind.TRAIN)
    while any([world.say(group), world.answer()]):
        pass
    assert group.goodbye is GoodbyeStatus.REFUSED
    assert not world.federation.engine.holds(0)


DRFA: dict[str, Any] = {
    "name": "drfa",
    "rounds": 12,
    "eta_w": 0.1,
    "eta_q": 0.2,
    "local_steps": 1,
    "sampled": 2,
}


def drawn_by_hand(position: Position, q: list[float], without: set[int]) -> tuple[int, ...]:
    """Which workers the paper's draws ask: by q with replacement, then evenly without."""
    stream = SharedRandomness((7).to_bytes(16, "little")).stream
    others = [worker for worker in range(len(q)) if worker not in without]
    if position.phase == 1:
        subset = stream(Purpose.LOSS_SAMPLING, position.round).subset(len(others), 2)
        return tuple(others[place] for place in subset)
    shares = [q[worker] for worker in others]
    shares = shares if sum(shares) > 0 else [1.0] * len(others)
    chosen = set()
    for uniform in stream(Purpose.MODEL_SAMPLING, position.round).uniform(2):
        point, total = uniform * float(np.cumsum(shares)[-1]), 0.0
        for worker, share in zip(others, shares, strict=True):
            total += share
            if point < total:
                chosen.add(worker)
                break
    return tuple(sorted(chosen))


@pytest.mark.parametrize("dies_at", [None, Position(4, 0), Position(6, 1), Position(9, 0)])
def test_drfa_draws_among_the_others(dies_at: Position | None) -> None:
    world = World(config_of(workers=5, algorithm=DRFA, faults=SKIPS))
    world.start()
    world.settle()
    quarantined: set[int] = set()
    drawn_without, seen = set(), {}

    def connect() -> list[Peer]:
        return [world.connect(Peer((worker,), bytes([65 + worker]))) for worker in range(5)]

    peers = connect()
    while world.finished is None:
        engine = world.federation.engine
        position = engine.step.position
        if engine.step.kind is not Kind.EVALUATE and position not in seen:
            participants = tuple(engine.participants)
            seen[position] = participants
            right = drawn_by_hand(position, engine.dual_weights.tolist(), drawn_without)
            assert participants == right, position
            if position == Position(3, 0):
                # All that the open phase has drawn, and others after it.
                quarantined = set(participants)
                world.handle(events.QuarantineChanged(",".join(map(str, sorted(quarantined)))))
            elif position == Position(8, 0):
                quarantined = set()
                world.handle(events.QuarantineChanged(""))
            if position == dies_at:
                world.die_and_resume()
                assert tuple(world.federation.engine.participants) == participants
                text = ",".join(map(str, sorted(quarantined)))
                world.handle(events.QuarantineChanged(text))
                peers = connect()
            drawn_without = quarantined
        assert any([*map(world.say, peers), world.answer()])
    assert world.finished[0] is ExitCode.OK, world.finished
    assert len(seen) == 24
    # The step that had asked them alone is closed without anybody.
    (nobody,) = (outcome for outcome, _ in world.appended if np.isnan(outcome.losses).all())
    assert nobody.step.position == Position(3, 0)
    for position, participants in seen.items():
        assert not (3 < position.round < 8 and set(participants) & set(seen[Position(3, 0)]))


def test_a_step_whose_workers_are_all_in_quarantine_and_gone_changes_nothing() -> None:
    world = World(config_of(workers=5, algorithm={**DRFA, "rounds": 10}, faults=SKIPS))
    world.start()
    world.settle()
    peers = [world.connect(Peer((worker,), bytes([65 + worker]))) for worker in range(5)]
    engine, told = world.federation.engine, {}
    while world.finished is None:
        drawn = engine.participants
        if engine.step.position == Position(3, 0) and not engine.quarantined:
            before, weights = engine.model.numpy().copy(), engine.dual_weights.copy()
            for worker in drawn:
                world.leave(peers[worker])
            world.handle(events.QuarantineChanged(",".join(map(str, drawn))))
        elif engine.step.position in {Position(3, 1), Position(4, 0)} and engine.quarantined:
            assert not engine.quarantined & set(drawn)
            if engine.step.position.phase == 1:
                assert engine.model.numpy().tobytes() == before.tobytes()
                assert engine.dual_weights.tobytes() == weights.tobytes()
        if (summary := world.federation.snapshot().last_round) is not None:
            told[summary.synchronization] = summary.losses
        assert any([*map(world.say, peers), world.answer()])
    assert world.finished[0] is ExitCode.OK, world.finished
    assert sorted(told) == [1, 2, *range(4, engine.synchronizations + 1)]
    assert not any(np.isnan(losses).all() for losses in told.values())


def test_drfa_draws_evenly_where_all_the_weight_is_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        federation_world, "loss_of", lambda worker, _: 1e6 if worker == HOSTILE else 1.0 + worker / 8
    )
    world = World(config_of(workers=5, algorithm={**DRFA, "eta_q": 1.0, "rounds": 6}, faults=SKIPS))
    world.start()
    world.settle()
    peers = [world.connect(Peer((worker,), bytes([65 + worker]))) for worker in range(5)]
    engine, seen = world.federation.engine, set()
    while world.finished is None:
        if engine.dual_weights[HOSTILE] == 1.0 and not engine.quarantined:
            world.handle(events.QuarantineChanged(f"{HOSTILE}"))
            since = engine.step.position
        elif engine.quarantined and engine.step.position > since and engine.step.kind is Kind.TRAIN:
            right = drawn_by_hand(engine.step.position, engine.dual_weights.tolist(), {HOSTILE})
            assert tuple(engine.participants) == right
            seen.add(engine.step.position)
        assert any([*map(world.say, peers), world.answer()])
    assert world.finished[0] is ExitCode.OK, world.finished
    assert seen


def test_what_a_worker_said_before_its_quarantine_moves_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = federation_world.loss_of
    monkeypatch.setattr(
        federation_world,
        "loss_of",
        lambda of, position: 1e300 if of == HOSTILE and position.round == 2 else honest(of, position),
    )
    world = World(config_of(algorithm={**ALGORITHM, "block": 4}, faults=SKIPS))
    world.start()
    world.settle()
    peers = [world.connect(Peer((worker,), bytes([65 + worker]))) for worker in range(3)]
    engine, after = world.federation.engine, set()
    while world.finished is None:
        assert any([*map(world.say, peers), world.answer()])
        if engine.step.position.round == 3 and not engine.quarantined:
            assert engine.dual_weights.tolist() == [0.0, 0.0, 1.0]
            world.handle(events.QuarantineChanged(f"{HOSTILE}"))
        elif engine.step.position.round > 5:
            # The weights have restarted.
            after.add(float(engine.dual_weights[HOSTILE]))
    assert world.finished[0] is ExitCode.OK, world.finished
    assert after
    assert all(0.3 < weight < 0.36 for weight in after)


def test_no_worker_says_of_itself_that_it_is_in_quarantine() -> None:
    world = World(config_of(algorithm=ALGORITHM, faults=SKIPS))
    world.start()
    world.settle()
    peer = world.connect(Peer((HOSTILE,), b"c"))
    assert world.say(peer)
    report = Report(HOSTILE, Position(1, 0), 0.0, 0, missing=QUARANTINED)
    world.handle(events.ReportBegan(peer.member, report))
    assert peer.goodbye is GoodbyeStatus.REFUSED
    assert world.federation.engine.missing() == [0, 1, 2]


def test_a_worker_in_quarantine_does_not_end_the_run() -> None:
    skips = {"stragglers": {"policy": "skip", "deadline": 30.0}}
    world = World(config_of(algorithm=ALGORITHM, faults=skips))
    world.start()
    world.settle()
    peers = [world.connect(Peer((worker,), bytes([65 + worker]))) for worker in range(3)]
    assert all(map(world.say, peers))
    world.handle(events.QuarantineChanged(f"{HOSTILE}"))
    for worker, is_fatal in ((HOSTILE, False), (0, True)):
        told = events.FailureTold(
            peers[worker].member, worker, Position(1, 0), int(FailureCause.NON_FINITE), "the loss is nan", ""
        )
        world.handle(told)
        while world.answer():
            pass
        assert (world.finished is not None) == is_fatal
    assert world.finished is not None
    assert world.finished[0] is ExitCode.DIVERGED
