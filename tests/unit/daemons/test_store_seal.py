"""State that is sealed with a key: what was made, or changed, without it is damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from afl.core.messages import Encoding, Kind, Payload, PayloadHeader, Position, Role, Step
from afl.core.rounds.results import Outcome
from afl.errors import StorageError
from afl.runs.durable import DamagedError, Seal, read_record, record_head
from afl_server.storage.store import Checkpoint, Entry, RunStore

KEY, OTHER = b"k" * 32, b"o" * 32


def filled(folder: Path, key: bytes | None, run_id: str = "a") -> Path:
    """Checkpoint 0, outcomes 0 and 1, and what is not trained."""
    with RunStore(folder, "process", key) as store:
        store.keep_frozen(b"frozen")
        arrays = {"params": np.arange(3, dtype=np.float32)}
        store.publish(store.write(Checkpoint(run_id, 0, {"engine": {}}, arrays)))
        for sequence in range(2):
            header = PayloadHeader(Role.UPDATE, Encoding.DENSE, 2, 2, 8)
            payload = Payload(header, (memoryview(bytes(8)),))
            step = Step(Position(sequence + 1, 0), Kind.TRAIN)
            store.append(Entry(sequence, Outcome(step, np.ones(2), payload)))
    return folder


def loaded(folder: Path, key: bytes | None) -> int:
    """How many outcomes are read; ``frozen`` and all are as they were written."""
    with RunStore(folder, "process", key) as store:
        found, entries = store.load()
        assert found.arrays["params"].tolist() == [0, 1, 2]
        assert store.frozen() == b"frozen"
        return len(list(entries))


def remade(path: Path, change: Callable[[dict], None], key: bytes | None = None) -> None:
    """Each record of a file with other content, and the checksums that this content has."""
    data, start, parts = memoryview(path.read_bytes()), 0, b""
    while start < len(data):
        record = read_record(data, start)
        values = json.loads(json.dumps(record.values))
        change(values)
        seal = None if key is None else Seal(key, path.name.partition("-")[0])
        parts += record_head(values, record.sections, seal) + b"".join(record.sections)
        start += record.length
    path.write_bytes(parts)


def test_who_has_the_key_reads_all(tmp_path: Path) -> None:
    assert loaded(filled(tmp_path, KEY), KEY) == 2


@pytest.mark.parametrize("key", [None, OTHER])
def test_a_checkpoint_that_is_remade_is_damaged(tmp_path: Path, key: bytes | None) -> None:
    filled(tmp_path / "open", None)
    remade(tmp_path / "open" / "checkpoint-000000000000", lambda values: values.update(engine={"evil": 1}))
    with RunStore(tmp_path / "open", "process") as store:
        assert store.load()[0].values["engine"] == {"evil": 1}, "without a key, whoever can write is believed"
    filled(tmp_path / "sealed", KEY)
    remade(tmp_path / "sealed" / "checkpoint-000000000000", lambda values: values.update(engine={}), key)
    with pytest.raises(StorageError, match=r"no checkpoint in .* is whole"):
        loaded(tmp_path / "sealed", KEY)


def test_state_of_no_key_of_another_or_of_a_sealed_run_without_one(tmp_path: Path) -> None:
    for ours in (None, OTHER):
        folder = filled(tmp_path / str(ours), ours)
        with pytest.raises(StorageError, match=r"no checkpoint in .* is whole"):
            loaded(folder, KEY)
        assert loaded(folder, ours) == 2, "it is left as it was"
    with pytest.raises(StorageError, match=r"is sealed: give the key .* as server\.integrity_key"):
        loaded(filled(tmp_path / "sealed", KEY), None)


def test_outcomes_that_are_remade_or_of_another_run_are_lost(tmp_path: Path) -> None:
    folder = filled(tmp_path / "ours", KEY)
    log = folder / "log-000000000000"
    whole = log.read_bytes()
    remade(log, lambda values: values.update(position=[1, 0]))
    for content in (log.read_bytes(), (filled(tmp_path / "b", KEY, "b") / log.name).read_bytes()):
        log.write_bytes(content)
        with RunStore(folder, "process", KEY) as store:
            assert not list(store.load()[1])
            assert store.loss is not None
            assert "does not have the seal" in store.loss.what
    log.write_bytes(whole)
    assert loaded(folder, KEY) == 2


def test_what_is_for_one_place_does_not_count_in_another(tmp_path: Path) -> None:
    folder = filled(tmp_path, KEY)
    shutil.copy(folder / "checkpoint-000000000000", folder / "frozen")
    with RunStore(folder, "process", KEY) as store, pytest.raises(StorageError, match="cannot be used"):
        store.frozen()


def test_an_outcome_that_was_cut_off_costs_nothing(tmp_path: Path) -> None:
    folder = filled(tmp_path, KEY)
    log = folder / "log-000000000000"
    log.write_bytes(log.read_bytes()[:-3])
    with RunStore(folder, "process", KEY) as store:
        assert len(list(store.load()[1])) == 1
        assert store.loss is None


@pytest.mark.parametrize("place", range(0, 200, 7))
def test_no_bit_of_a_record_can_be_changed(place: int) -> None:
    seal, values = Seal(KEY, "test"), {"a": [1, {"mac": "none"}], "b": ',"mac":"'}
    parts = [b"content", b"", b"more"]
    head = record_head(values, parts, seal)
    whole = head + b"".join(parts)
    assert read_record(memoryview(whole), seal=seal).values == values
    assert read_record(memoryview(whole)).is_sealed
    content = bytearray(whole)
    content[place % len(content)] ^= 1
    with pytest.raises(DamagedError):
        read_record(memoryview(bytes(content)), seal=seal)


@pytest.mark.parametrize(
    "header", [b"[]", b"{}", b'{"values":{},"lengths":[-1],"checksum":0}', b'{"values":1,"lengths":[]}', b"["]
)
def test_a_header_that_is_none_is_damage(header: bytes) -> None:
    whole = b"AFL2" + len(header).to_bytes(4, "little") + crc32(header).to_bytes(4, "little") + header
    with pytest.raises(DamagedError, match="header is none"):
        read_record(memoryview(whole))


def test_a_header_without_a_checksum_is_damage() -> None:
    header = b'{"values":{},"lengths":[]}'
    whole = b"AFL2" + len(header).to_bytes(4, "little") + crc32(header).to_bytes(4, "little") + header
    for seal in (None, Seal(KEY, "test")):
        with pytest.raises(DamagedError, match="content is not as it was written"):
            read_record(memoryview(whole), seal=seal)
