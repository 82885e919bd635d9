"""What a federation does against one worker that reports what it likes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import federation_world
import numpy as np
import pytest
from federation_world import Peer, World, config_of

from afl.core.messages import Payload, PayloadHeader, Position
from afl.errors import ExitCode
from afl_server.federation import effects, events
from afl_server.runner.run import quarantine_text

HOSTILE = 2
ALGORITHM: dict[str, Any] = {"name": "afl-br", "rounds": 8, "eta_w": 0.1, "eta_q": 0.1, "block": 100}


def lying(monkeypatch: pytest.MonkeyPatch, loss: float, worker: int = HOSTILE) -> None:
    """The worker reports this loss in rounds 3 and 4."""
    honest = federation_world.loss_of

    def told(of: int, position: Position) -> float:
        return loss if of == worker and position.round in {3, 4} else honest(of, position)

    monkeypatch.setattr(federation_world, "loss_of", told)


def ended(config: Any, *, resumes: bool = False) -> World:
    """A run to its end, put back once to its last checkpoint in round 6."""
    world = World(config)
    world.start()
    world.settle()
    peers = [Peer((worker,), bytes([65 + worker])) for worker in range(3)]
    for peer in peers:
        world.connect(peer)
    while world.finished is None:
        if resumes and world.federation.engine.step.position == Position(6, 0):
            world.die_and_resume()
            world.complete()
            break
        assert any([*map(world.say, peers), world.answer()])
    assert world.finished is not None
    assert world.finished[0] is ExitCode.OK, world.finished
    return world


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
        capped, resumed = ended(config), ended(config, resumes=True)
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
    world = ended(config_of(algorithm=ALGORITHM, faults={"loss_cap": 20.0}), resumes=True)
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
    world, resumed = ended(config), ended(config, resumes=True)
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
    ],
)
def test_a_quarantine_that_cannot_be_kept_is_told_and_changes_nothing(
    text: str, faults: dict[str, Any], why: str
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
