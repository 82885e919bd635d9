"""A worker's journal: what was written last is read back, or what was written before it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from afl.core.messages import Encoding, Kind, Payload, PayloadHeader, Position, Report, Role
from afl.core.participant import Kept
from afl.errors import ConfigError, StorageError
from afl.runs import durable
from afl.runs.durable import InUseError, read_record
from afl_worker import journal as journal_module
from afl_worker.journal import Journal, Journals, Owner, remove_left_behind

OWN = Owner("run-1", b"layout".hex(), 3)


def kept(round_: int, length: int = 5) -> Kept:
    header = PayloadHeader(
        Role.UPDATE, Encoding.INDEXED, 100, length, 4 * length, index_coding=1, index_bytes=3
    )
    data = np.full(length, round_, dtype="<f4").tobytes()
    return Kept(
        Kind.TRAIN,
        Report(3, Position(round_, 0), 0.1 * round_, 16, (header,), weight=7.0),
        (Payload(header, (memoryview(b"abc"), memoryview(data))),),
        {"residual": np.arange(100, dtype=np.float32) / round_},
        {"0": np.array([1, 2, round_], dtype=np.uint8), "2": np.zeros(0, dtype=np.uint8)},
    )


def same(one: Kept | None, other: Kept) -> bool:
    return (
        one is not None
        and (one.kind, one.report) == (other.kind, other.report)
        and [bytes(p.data) for p in one.payloads] == [bytes(p.data) for p in other.payloads]
        and {k: v.tobytes() for k, v in one.state.items()} == {k: v.tobytes() for k, v in other.state.items()}
        and {k: v.tobytes() for k, v in one.buffers.items()}
        == {k: v.tobytes() for k, v in other.buffers.items()}
    )


def opened(folder: Path, identity: Owner = OWN, *, syncs: bool = False) -> Journal:
    return Journal(folder / "worker.journal", identity, syncs=syncs)


def filled(folder: Path, rounds: int, length: int = 5, *, syncs: bool = False) -> None:
    journal = opened(folder, syncs=syncs)
    assert journal.read() is None
    for round_ in range(1, rounds + 1):
        journal.write(kept(round_, length))
    journal.close()


def reread(folder: Path, identity: Owner = OWN) -> Kept | None:
    journal = opened(folder, identity)
    try:
        return journal.read()
    finally:
        journal.close()


@pytest.mark.parametrize("syncs", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 3, 10])
def test_the_last_entry_is_read_back(tmp_path, rounds, syncs):
    filled(tmp_path, rounds, syncs=syncs)
    assert same(reread(tmp_path), kept(rounds))


def test_an_entry_without_residual_buffers_or_payload(tmp_path):
    entry = replace(kept(1), state={}, buffers={}, payloads=())
    entry = replace(entry, report=replace(entry.report, payloads=(), missing="the loss is nan"))
    journal = opened(tmp_path)
    journal.write(entry)
    journal.close()
    found = reread(tmp_path)
    assert (found.report, dict(found.state), found.payloads, dict(found.buffers)) == (
        entry.report,
        {},
        (),
        {},
    )


def test_writing_goes_on_after_reading(tmp_path):
    filled(tmp_path, 3)
    journal = opened(tmp_path)
    journal.read()
    journal.write(kept(4))
    journal.close()
    assert same(reread(tmp_path), kept(4))


def test_an_entry_that_outgrows_its_place_is_kept_too(tmp_path):
    journal = opened(tmp_path)
    for round_, length in ((1, 5), (2, 40_000), (3, 5), (4, 90_000)):
        journal.write(kept(round_, length))
        journal.close()
        journal = opened(tmp_path)
        assert same(journal.read(), kept(round_, length))
    journal.close()


@pytest.mark.parametrize("rounds", [2, 3])
def test_an_entry_that_was_torn_leaves_the_one_before(tmp_path, rounds, caplog):
    """Any of its bytes may be old: of the head, and of the content."""
    filled(tmp_path, rounds)
    path = tmp_path / "worker.journal"
    whole = path.read_bytes()
    start = rounds % 2 * (len(whole) // 2)
    generator = np.random.default_rng(rounds)
    length = read_record(memoryview(whole), start).length
    for place in [0, 4, 8, 12, 100, length - 1, *generator.integers(12, length, 40).tolist()]:
        torn = bytearray(whole)
        torn[start + place] ^= 0x5A
        path.write_bytes(torn)
        assert same(reread(tmp_path), kept(rounds - 1)), place
    assert {record.event for record in caplog.records} == {"journal_damaged"}


def test_an_entry_that_is_lost_is_told_from_a_write_that_did_not_come_to_its_head(tmp_path):
    filled(tmp_path, 3)
    path = tmp_path / "worker.journal"
    whole = path.read_bytes()
    for rounds, may_lack in ((2, False), (3, True)):
        start = rounds % 2 * (len(whole) // 2)
        spoilt = bytearray(whole)
        spoilt[start + read_record(memoryview(whole), start).length - 1] ^= 0x5A
        path.write_bytes(spoilt)
        journal = opened(tmp_path)
        assert same(journal.read(), kept(5 - rounds))
        assert journal.may_lack_newest is may_lack
        journal.close()
    for spoilt in (whole[: len(whole) // 2], bytes(len(whole))):
        path.write_bytes(spoilt)
        journal = opened(tmp_path)
        journal.read()
        assert journal.may_lack_newest
        journal.close()


@given(data=st.data(), rounds=st.integers(1, 4), length=st.sampled_from([5, 9000]))
def test_a_write_that_is_cut_off_anywhere_leaves_the_entry_before(tmp_path_factory, data, rounds, length):
    """The place written to may hold any mixture of old, new and foreign bytes."""
    folder = tmp_path_factory.mktemp("torn")
    filled(folder, rounds, length)
    path = folder / "worker.journal"
    before = path.read_bytes()
    journal = opened(folder)
    journal.read()
    journal.write(kept(rounds + 1, length))
    journal.close()
    after = path.read_bytes()
    room = len(before) // 2
    start = (rounds + 1) % 2 * room
    record = read_record(memoryview(after), start)
    head = record.length - sum(map(len, record.sections))
    torn = bytearray(before)
    content = start + head
    stop = data.draw(st.integers(content, content + record.length - head))
    torn[content:stop] = after[content:stop]
    if stop == content + record.length - head:
        written = data.draw(st.integers(0, head))
        torn[start : start + written] = after[start : start + written]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, room - 1))
        garbage = data.draw(st.binary(max_size=min(64, room - at)))
        torn[start + at : start + at + len(garbage)] = garbage
    # An entry that says it is another version's is refused, which is another test's.
    assume(torn[start : start + 4] != b"AFL1")
    path.write_bytes(torn)
    found = reread(folder)
    is_whole = bytes(torn[start : start + record.length]) == after[start : start + record.length]
    assert same(found, kept(rounds + 1 if is_whole else rounds, length))


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_a_journal_that_was_cut_off_is_never_used_quietly(tmp_path, rounds, caplog):
    filled(tmp_path, rounds)
    path = tmp_path / "worker.journal"
    whole = path.read_bytes()
    for length in (0, 1, 100, 4096, len(whole) // 2, len(whole) // 2 + 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        caplog.clear()
        journal = opened(tmp_path)
        found = journal.read()
        assert found is None or found.report.position.round in {rounds, rounds - 1}
        assert [record.event for record in caplog.records] == ["journal_damaged"], length
        journal.write(kept(rounds + 1))
        journal.close()
        caplog.clear()
        again = opened(tmp_path)
        assert same(again.read(), kept(rounds + 1))
        again.close()


def test_a_journal_of_which_nothing_is_whole_is_none_loudly(tmp_path, caplog):
    filled(tmp_path, 2)
    path = tmp_path / "worker.journal"
    path.write_bytes(b"x" * path.stat().st_size)
    assert reread(tmp_path) is None
    assert "the journal is ignored" in caplog.text


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (replace(OWN, run_id="run-2"), "journal of run id run-1, not run-2"),
        (replace(OWN, worker=4), "journal of worker 3, not 4"),
        (replace(OWN, layout=b"another".hex()), "journal of another model; name another directory"),
    ],
)
def test_anothers_journal_is_refused(tmp_path, identity, message):
    filled(tmp_path, 2)
    with pytest.raises(ConfigError, match=message):
        reread(tmp_path, identity)


def test_another_versions_journal_is_refused(tmp_path):
    filled(tmp_path, 1)
    path = tmp_path / "worker.journal"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"AFL2", b"AFL1"))
    with pytest.raises(ConfigError, match=r"worker\.journal cannot be used: .* earlier version of afl"):
        reread(tmp_path)


def test_two_pages_that_have_changed_places_leave_the_entry_before(tmp_path, caplog):
    residuals = [np.arange(20_000, dtype=np.float32) / round_ for round_ in (1, 2)]
    entries = [replace(kept(round_), state={"residual": residuals[round_ - 1]}) for round_ in (1, 2)]
    journal = opened(tmp_path)
    for entry in entries:
        journal.write(entry)
    journal.close()
    path = tmp_path / "worker.journal"
    content = bytearray(path.read_bytes())
    start = content.index(residuals[1].tobytes())
    one, other = slice(start, start + 4096), slice(start + 4096, start + 8192)
    content[one], content[other] = content[other], content[one]
    path.write_bytes(content)
    assert same(reread(tmp_path), entries[0])
    assert [record.event for record in caplog.records] == ["journal_damaged"]


def test_two_processes_cannot_have_one_journal(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "LOCK_PATIENCE_S", 0.0)
    journals = Journals(tmp_path, "run-1", b"layout", (3, 4), "process")
    with pytest.raises(InUseError, match="worker 4's journal is in use"):
        Journals(tmp_path, "run-1", b"layout", (4, 5), "process")
    journals.close()
    Journals(tmp_path, "run-1", b"layout", (4, 5), "process").close()


def test_a_full_disk_is_named_and_the_last_entry_stands(tmp_path, monkeypatch):
    filled(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    journal = opened(tmp_path)
    journal.read()
    monkeypatch.setattr(journal_module.os, "posix_fallocate", full)
    said = r"worker.journal cannot be used \(No space left on device\): .* is sent; free some space$"
    with pytest.raises(StorageError, match=said):
        journal.write(kept(2, 100_000))
    journal.close()
    assert same(reread(tmp_path), kept(1))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="--journal"):
        Journals(tmp_path / "file", "run-1", b"layout", (3,), "process")


@pytest.mark.parametrize("syncs", [False, True])
def test_an_entry_is_on_the_disk_when_it_is_written_where_the_machine_may_fail(tmp_path, monkeypatch, syncs):
    journal = opened(tmp_path, syncs=syncs)
    journal.write(kept(1))
    states: list[bytes] = []
    path = tmp_path / "worker.journal"
    monkeypatch.setattr(os, "fdatasync", lambda _: states.append(path.read_bytes()))
    journal.write(kept(2))
    journal.close()
    assert len(states) == (2 if syncs else 0)
    if syncs:
        content, whole = states
        assert whole == path.read_bytes() != content, "what is described is there before what describes it"


@pytest.mark.parametrize("level", ["process", "machine"])
def test_folders_that_are_made_outlive_a_loss_of_power_where_they_must(tmp_path, monkeypatch, level):
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    Journals(tmp_path / "some" / "where", "run-1", b"layout", (3,), level).close()
    made = [tmp_path / "some" / "where", tmp_path / "some", tmp_path]
    assert synced == (made if level == "machine" else [])


def test_a_run_that_is_complete_leaves_nothing(tmp_path):
    journals = Journals(tmp_path, "run-1", b"layout", (3, 4), "machine")
    journals.write(kept(1))
    journals.remove()
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


def test_what_is_left_of_a_complete_run_is_removed_for_these_workers_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "LOCK_PATIENCE_S", 0.05)
    for run_id, workers in (("run-1", (1, 3, 4)), ("run-2", (3,))):
        journals = Journals(tmp_path, run_id, b"layout", workers, "process")
        journals.write(kept(1))
        journals.close()
    in_use = Journals(tmp_path, "run-1", b"layout", (4,), "process")
    remove_left_behind(tmp_path, "run-1", (3, 4, 5))
    in_use.close()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")) == [
        "run-1/worker-1.lock",
        "run-1/worker-4.lock",
        "run-2/worker-3.journal",
        "run-2/worker-3.lock",
    ]
    remove_left_behind(tmp_path, "run-1", (1, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
    remove_left_behind(tmp_path, "run-3", (3,))
    assert [path.name for path in tmp_path.iterdir()] == ["run-2"]
