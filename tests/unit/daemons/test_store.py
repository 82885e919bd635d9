"""The run's durable state: what was closed is read back, whatever was cut or damaged."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from afl.core import disk_usage
from afl.core.messages import Encoding, Kind, Payload, PayloadHeader, Position, Role, Step
from afl.core.rounds.results import Evaluation, Outcome
from afl.errors import StorageError
from afl.runs import durable
from afl.runs.durable import InUseError
from afl_server.storage import store as store_module
from afl_server.storage.store import Checkpoint, Entry, Loss, RunStore

LOSSES = np.array([0.1, np.nan, 1e300])


def checkpoint(sequence: int) -> Checkpoint:
    return Checkpoint(
        "run-1",
        sequence,
        {"engine": {"position": [sequence, 0]}, "tallies": {"a": 0.1}},
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


@pytest.mark.parametrize("durability", ["process", "machine"])
def test_checkpoints_are_synced_and_where_the_machine_may_fail_each_outcome_too(
    tmp_path, monkeypatch, durability
):
    synced: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda handle: synced.append(os.fstat(handle).st_ino))
    with RunStore(tmp_path, durability) as store:
        temporary = store.write(checkpoint(0))
        store.publish(temporary)
        inode = (tmp_path / "checkpoint-000000000000").stat().st_ino
        folder = tmp_path.stat().st_ino
        assert synced[-2:] == [inode, folder], "the name comes after the content"
        log = (tmp_path / "log-000000000000").stat().st_ino
        for count in range(1, 4):
            store.append(entry(count - 1))
            assert synced.count(log) == (count if durability == "machine" else 0)


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


def lost(folder: Path) -> tuple[list[int], Loss | None]:
    """The outcomes that are read, and what is known to be lost; the folder stays as it is."""
    with RunStore(folder, "process") as store:
        _found, entries = store.load()
        read_ones = [one.sequence for one in entries]
        return read_ones, store.loss


def one_log(folder: Path, outcomes: int = 5) -> tuple[Path, list[int]]:
    """Checkpoint 0 and its log, and where the outcomes in that begin and end."""
    with RunStore(folder, "process") as store:
        store.publish(store.write(checkpoint(0)))
        log = folder / "log-000000000000"
        ends = [0]
        for sequence in range(outcomes):
            store.append(entry(sequence))
            ends.append(log.stat().st_size)
    return log, ends


def test_a_bit_that_flipped_anywhere_in_the_newest_log_cuts_nothing_off(tmp_path, caplog):
    log, ends = one_log(tmp_path)
    whole = log.read_bytes()
    # Magic, lengths, checksums, headers and content of the second of five outcomes.
    for place in range(ends[1], ends[2]):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        log.write_bytes(content)
        outcomes, loss = lost(tmp_path)
        assert outcomes == [0]
        assert loss is not None
        assert (loss.log, loss.position, loss.readable) == (0, ends[1], 3)
        assert log.read_bytes() == content
    assert not caplog.records


def test_a_flip_in_the_last_outcome_is_no_cut_write(tmp_path, caplog):
    log, ends = one_log(tmp_path)
    content = bytearray(log.read_bytes())
    content[-1] ^= 1
    log.write_bytes(content)
    outcomes, loss = lost(tmp_path)
    assert outcomes == [0, 1, 2, 3]
    assert loss is not None
    assert (loss.position, loss.readable) == (ends[4], 0)
    assert not caplog.records


def test_room_that_was_never_written_to_is_a_cut_write(tmp_path, caplog):
    log, ends = one_log(tmp_path)
    content = log.read_bytes()
    log.write_bytes(content[: ends[4]] + bytes(len(content) - ends[4]))
    assert lost(tmp_path) == ([0, 1, 2, 3], None)
    assert log.stat().st_size == ends[4]
    assert [record.event for record in caplog.records] == ["log_cut"]


def test_what_cannot_be_gone_on_with_is_kept_beside(tmp_path):
    log, ends = one_log(tmp_path)
    content = bytearray(log.read_bytes())
    content[ends[1] + 40] ^= 1
    log.write_bytes(content)
    # Twice, as when a backup of it is put back.
    for number in ("", "1"):
        with RunStore(tmp_path, "process") as store:
            assert len(list(store.load()[1])) == 1
            # Not published: the server was killed before.
            store.write(checkpoint(1))
            assert log.stat().st_size == ends[1]
            aside = tmp_path / f"log-000000000000.damaged{number}"
            assert aside.read_bytes() == content[ends[1] :]
            store.append(entry(1))
        assert lost(tmp_path) == ([0, 1], None)
        log.write_bytes(content)
        (tmp_path / "log-000000000001").unlink()


def test_an_older_log_that_is_damaged_is_lost_with_all_that_follows_and_kept(tmp_path, caplog):
    filled(tmp_path)
    (tmp_path / "checkpoint-000000000006").unlink()
    log = tmp_path / "log-000000000003"
    later = (tmp_path / "log-000000000006").read_bytes()
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    with RunStore(tmp_path, "process") as store:
        found, entries = store.load()
        assert found.sequence == 3
        assert [one.sequence for one in entries] == [3]
        assert store.loss is not None
        assert store.loss.readable == 1 + 2
        store.publish(store.write(checkpoint(4)))
    assert (tmp_path / "log-000000000006.damaged").read_bytes() == later
    assert content.endswith((tmp_path / "log-000000000003.damaged").read_bytes())
    assert lost(tmp_path) == ([], None)


@pytest.mark.parametrize(("gone", "outcomes", "readable"), [(6, [], 0), (3, [], 2)])
def test_a_log_that_is_missing_is_lost(tmp_path, gone, outcomes, readable):
    filled(tmp_path)
    if gone == 3:
        (tmp_path / "checkpoint-000000000006").unlink()
    (tmp_path / f"log-{gone:012d}").unlink()
    found, loss = lost(tmp_path)
    assert found == outcomes
    assert loss is not None
    assert f"log-{gone:012d} is not there" in loss.what
    assert loss.readable == readable


def test_a_log_between_two_that_is_missing_is_lost(tmp_path):
    filled(tmp_path)
    (tmp_path / "checkpoint-000000000006").unlink()
    with RunStore(tmp_path, "process") as store:
        store.load()
        store.write(checkpoint(8))
        store.append(entry(8))
    (tmp_path / "log-000000000006").unlink()
    with RunStore(tmp_path, "process") as store:
        assert [one.sequence for one in store.load()[1]] == [3, 4, 5]
        assert store.loss is not None
        assert "log-000000000008 begins behind outcome 6, which is missing" in store.loss.what
        store.publish(store.write(checkpoint(6)))
        store.append(entry(6))
    # The log that was begun too late is not taken for the next one's successor.
    assert (tmp_path / "log-000000000008.damaged").exists()
    assert lost(tmp_path) == ([6], None)


def test_a_damaged_checkpoint_is_not_one_of_the_two_that_are_kept(tmp_path):
    filled(tmp_path)
    newest = tmp_path / "checkpoint-000000000006"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    with RunStore(tmp_path, "process") as store:
        list(store.load()[1])
        store.publish(store.write(checkpoint(8)))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-000000000003",
        "checkpoint-000000000006.damaged",
        "checkpoint-000000000008",
    ]
    (tmp_path / "checkpoint-000000000008").unlink()
    assert lost(tmp_path) == ([3, 4, 5, 6, 7], None)


def test_without_a_whole_checkpoint_there_is_an_error(tmp_path):
    filled(tmp_path)
    for path in tmp_path.glob("checkpoint-*"):
        path.write_bytes(b"")
    with pytest.raises(StorageError, match=r"no checkpoint .* is whole"):
        read(tmp_path)


@pytest.mark.timeout(60)
def test_a_fifo_in_the_place_of_state_is_not_waited_for(tmp_path: Path) -> None:
    """A checkpoint costs nothing as long as the one before it is whole."""
    filled(tmp_path)
    for name in ("checkpoint-000000000006", "log-000000000006"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        if name.startswith("checkpoint"):
            found, entries = read(tmp_path)
            assert (found.sequence, [each.sequence for each in entries]) == (3, [3, 4, 5, 6, 7])
            del found, entries
    with pytest.raises(StorageError, match="it is no plain file"):
        read(tmp_path)


def test_another_versions_state_is_left_as_it_is_and_named(tmp_path):
    filled(tmp_path)
    newest = tmp_path / "checkpoint-000000000006"
    content = b"AFL1" + newest.read_bytes()[4:]
    newest.write_bytes(content)
    with pytest.raises(
        StorageError, match=r"checkpoint-000000000006 cannot be used: .* earlier version of afl"
    ):
        read(tmp_path)
    assert newest.read_bytes() == content


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


def test_a_checkpoint_that_cannot_be_written_leaves_no_part_and_says_which_file(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with RunStore(tmp_path, "process") as store:
        store.publish(store.write(checkpoint(0)))
        monkeypatch.setattr(store_module.os, "write", full)
        with pytest.raises(
            StorageError, match=r"checkpoint-000000000001\.new cannot be written: .*; free some space"
        ):
            store.write(checkpoint(1))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000000000000",
        "lock",
        "log-000000000000",
    ]


def test_what_a_killed_server_left_of_a_checkpoint_is_removed_with_the_next(tmp_path):
    filled(tmp_path)
    (tmp_path / "checkpoint-000000000008.new").write_bytes(b"half")
    with RunStore(tmp_path, "process") as store:
        list(store.load()[1])
        store.publish(store.write(checkpoint(9)))
    assert not list(tmp_path.glob("*.new"))


def test_two_servers_cannot_have_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "LOCK_PATIENCE_S", 0.0)
    with RunStore(tmp_path, "process"), pytest.raises(InUseError, match="in use by another process"):
        RunStore(tmp_path, "process")


def test_a_step_leaves_nothing_in_the_interpreter_s_table_of_strings(tmp_path):
    """One string a step would fill it, though each is soon gone: 3.7 MB more after 75,000 steps."""
    interned = []
    with RunStore(tmp_path, "process") as store:
        store.publish(store.write(checkpoint(0)))
        sys.setprofile(lambda frame, _, what: interned.append(frame) if what is sys.intern else None)
        try:
            store.append(entry(0))
        finally:
            sys.setprofile(None)
    assert not interned


def test_a_log_that_grows_long_makes_a_checkpoint_due(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_usage, "SMALLEST_LOG_BYTES", 1)
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
