"""The run's durable state: what was closed is read back, whatever was cut or damaged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afl import sizing
from afl.durable import InUseError
from afl.engine import Evaluation, Outcome
from afl.errors import StorageError
from afl.messages import Encoding, Kind, Payload, PayloadHeader, Position, Role, Step
from afl_server import store as store_module
from afl_server.store import Checkpoint, Entry, RunStore

LOSSES = np.array([0.1, np.nan, 1e300])


def checkpoint(sequence: int) -> Checkpoint:
    return Checkpoint(
        "run-1",
        sequence,
        {"engine": {"position": [sequence, 0]}, "counters": {"a": 0.1}},
        {"params": np.arange(4, dtype=np.float32) + sequence, "empty": np.zeros((0, 2))},
    )


def entry(sequence: int) -> Entry:
    data = np.full(3, sequence, dtype="<f4").tobytes()
    header = PayloadHeader(Role.UPDATE, Encoding.SEEDED, 10, 3, 12)
    return Entry(
        sequence,
        Outcome(
            Step(Position(sequence + 1, 0), Kind.TRAIN),
            LOSSES,
            Payload(header, (memoryview(data[:4]), memoryview(data[4:]))),
            {"downlink_residual": np.full(2, -sequence, dtype=np.float32)},
        ),
        {"seconds": 0.5},
    )


def filled(folder: Path, durability: str = "process") -> None:
    """Checkpoints 0, 3 and 6, and outcomes 0 to 7."""
    with RunStore(folder, durability) as store:
        for sequence in range(8):
            if sequence % 3 == 0:
                store.publish(store.write(checkpoint(sequence)))
            store.append(entry(sequence))


def same(one: Entry, other: Entry) -> bool:
    mine, theirs = one.outcome, other.outcome
    return (
        (one.sequence, mine.step, one.values) == (other.sequence, theirs.step, other.values)
        and mine.losses.tobytes() == theirs.losses.tobytes()
        and (mine.payload is None) == (theirs.payload is None)
        and (
            mine.payload is None
            or (mine.payload.header, mine.payload.data) == (theirs.payload.header, theirs.payload.data)
        )
        and {k: v.tobytes() for k, v in mine.unsent.items()}
        == {k: v.tobytes() for k, v in theirs.unsent.items()}
    )


def read(folder: Path) -> tuple[Checkpoint, list[Entry]]:
    with RunStore(folder, "process") as store:
        found, entries = store.load()
        return found, list(entries)


@pytest.mark.parametrize("durability", ["process", "machine"])
def test_the_newest_checkpoint_and_what_was_closed_since_are_read_back(tmp_path, durability):
    filled(tmp_path, durability)
    found, entries = read(tmp_path)
    assert (found.run_id, found.sequence, dict(found.values)) == ("run-1", 6, dict(checkpoint(6).values))
    assert found.arrays["params"].tolist() == [6, 7, 8, 9]
    assert found.arrays["empty"].shape == (0, 2)
    assert [one.sequence for one in entries] == [6, 7]
    assert all(same(one, entry(one.sequence)) for one in entries)


def test_an_evaluation_is_read_back(tmp_path):
    evaluation = Evaluation(5, 5, ({"loss": 0.1}, {"loss": 1 / 3}), (3, 4), (1,))
    with RunStore(tmp_path, "process") as store:
        store.publish(store.write(checkpoint(0)))
        step = Step(Position(5, 255), Kind.EVALUATE)
        store.append(Entry(0, Outcome(step, LOSSES, evaluation=evaluation)))
    assert read(tmp_path)[1][0].outcome.evaluation == evaluation


def test_only_the_last_two_checkpoints_and_their_logs_are_kept(tmp_path):
    filled(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "checkpoint-000000000003",
        "checkpoint-000000000006",
        "lock",
        "log-000000000003",
        "log-000000000006",
    ]


@pytest.mark.parametrize("damage", ["cut", "garbled", "gone"])
def test_a_damaged_newest_checkpoint_costs_nothing(tmp_path, damage, caplog):
    filled(tmp_path)
    path = tmp_path / "checkpoint-000000000006"
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "garbled":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    found, entries = read(tmp_path)
    assert found.sequence == 3
    assert [one.sequence for one in entries] == [3, 4, 5, 6, 7]
    assert all(same(one, entry(one.sequence)) for one in entries)
    assert [record.event for record in caplog.records] == ([] if damage == "gone" else ["checkpoint_damaged"])


def test_a_checkpoint_that_was_never_published_is_not_there(tmp_path):
    filled(tmp_path)
    with RunStore(tmp_path, "process") as store:
        store.load()
        store.write(checkpoint(8))
        store.append(entry(8))
    found, entries = read(tmp_path)
    assert found.sequence == 6
    assert [one.sequence for one in entries] == [6, 7, 8]


def test_an_outcome_that_was_cut_off_is_not_there_and_the_log_goes_on(tmp_path, caplog):
    filled(tmp_path)
    log = tmp_path / "log-000000000006"
    whole = log.read_bytes()
    length = len(whole) // 2
    for size in range(length, len(whole)):
        log.write_bytes(whole[:size])
        _found, entries = read(tmp_path)
        assert [one.sequence for one in entries] == [6]
        assert log.stat().st_size == length
    assert {record.event for record in caplog.records} == {"log_cut"}
    with RunStore(tmp_path, "process") as store:
        store.load()
        store.write(checkpoint(7))
        store.append(entry(7))
    # The checkpoint was not published: the log that was cut is read again, and then the next.
    assert [one.sequence for one in read(tmp_path)[1]] == [6, 7]


def test_rounds_that_are_lost_are_named(tmp_path, caplog):
    filled(tmp_path)
    (tmp_path / "checkpoint-000000000006").unlink()
    log = tmp_path / "log-000000000003"
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    found, entries = read(tmp_path)
    assert found.sequence == 3
    assert [one.sequence for one in entries] == [3]
    assert [record.event for record in caplog.records] == ["rounds_lost"]


def test_without_a_whole_checkpoint_there_is_an_error(tmp_path):
    filled(tmp_path)
    for path in tmp_path.glob("checkpoint-*"):
        path.write_bytes(b"")
    with pytest.raises(StorageError, match=r"no checkpoint .* is whole"):
        read(tmp_path)


def test_a_write_that_fails_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    with RunStore(tmp_path, "process") as store:
        store.publish(store.write(checkpoint(0)))
        store.append(entry(0))
        real = os.write

        def full(handle: int, data: memoryview) -> int:
            if len(data) > 8:
                return real(handle, data[:8])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store_module.os, "write", full)
        with pytest.raises(StorageError, match="No space left on device"):
            store.append(entry(1))
        monkeypatch.undo()
        store.append(replace(entry(1), values={"second": True}))
    assert [(one.sequence, dict(one.values)) for one in read(tmp_path)[1]] == [
        (0, {"seconds": 0.5}),
        (1, {"second": True}),
    ]


def test_two_servers_cannot_have_one_run(tmp_path):
    with RunStore(tmp_path, "process"), pytest.raises(InUseError, match="in use by another process"):
        RunStore(tmp_path, "process")


def test_a_log_that_grows_long_makes_a_checkpoint_due(tmp_path, monkeypatch):
    monkeypatch.setattr(sizing, "SMALLEST_LOG_BYTES", 1)
    with RunStore(tmp_path, "process") as store:
        store.publish(store.write(checkpoint(0)))
        size = (tmp_path / "checkpoint-000000000000").stat().st_size
        appended = 0
        while not store.is_due:
            store.append(entry(appended))
            appended += 1
        assert (tmp_path / "log-000000000000").stat().st_size > 8 * size
        store.publish(store.write(checkpoint(appended)))
        assert not store.is_due


def test_frozen_parameters_are_written_once_and_read_back(tmp_path):
    with RunStore(tmp_path, "process") as store:
        store.keep_frozen(b"frozen")
        store.keep_frozen(b"others")
        assert store.frozen() == b"frozen"
        (tmp_path / "frozen").write_bytes(b"garbage")
        with pytest.raises(StorageError, match="restore it from a backup"):
            store.frozen()
