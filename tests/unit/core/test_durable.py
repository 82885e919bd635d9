"""Records in files: whole ones are read as written, others are told from them."""

import errno
import json
import os
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afl.errors import ExitCode
from afl.runs import durable
from afl.runs.durable import (
    DamagedError,
    InUseError,
    OtherVersionError,
    is_locked,
    lock,
    next_record,
    read_record,
    record_head,
    replacing,
    unlock,
    write_whole,
)

sections = st.lists(st.binary(max_size=200), max_size=4)
values = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=4)


@given(values=values, parts=sections, before=st.binary(max_size=20), after=st.binary(max_size=20))
def test_a_record_is_read_as_it_was_written(values, parts, before, after):
    data = before + record_head(values, parts) + b"".join(parts) + after
    record = read_record(memoryview(data), len(before))
    assert record.values == values
    assert [bytes(part) for part in record.sections] == parts
    assert record.length == len(data) - len(before) - len(after)


@given(parts=sections)
def test_checksums_are_those_of_zlib_whatever_computes_them(parts):
    head = record_head({}, parts)
    assert int.from_bytes(head[8:12], "little") == zlib.crc32(head[12:])
    assert json.loads(head[12:])["checksum"] == zlib.crc32(b"".join(parts))


@given(values=values, parts=sections, data=st.data())
def test_a_record_that_is_cut_or_changed_is_damaged(values, parts, data):
    whole = record_head(values, parts) + b"".join(parts)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DamagedError):
        read_record(memoryview(whole[:cut]))
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedError):
        read_record(memoryview(changed))


@given(part=st.binary(min_size=5, max_size=3000), burst=st.integers(1, 2**32 - 1), data=st.data())
def test_two_wrong_bits_or_any_change_within_32_bits_are_damage(part, burst, data):
    whole = record_head({}, [part]) + part
    last = 8 * len(whole) - 1
    first, other = data.draw(st.lists(st.integers(0, last), min_size=2, max_size=2, unique=True))
    start = data.draw(st.integers(0, last - 31))
    for wrong in (1 << first | 1 << other, burst << start):
        changed = int.from_bytes(whole, "little") ^ wrong
        with pytest.raises(DamagedError):
            read_record(memoryview(changed.to_bytes(len(whole), "little")))


@pytest.mark.parametrize("length", [8 * 4096, 8 * 4096 + 3, 300_001])
def test_a_long_section_that_is_changed_is_damaged(length):
    """A bit, the order of two blocks, a page that is older, a cut, at any place; and read at any place."""
    generator = random.Random(length)
    part = generator.randbytes(length)
    head = record_head({}, [part])
    for start in (0, 1, 5):
        record = read_record(memoryview(b"x" * start + head + part), start)
        assert bytes(record.sections[0]) == part
    for _ in range(30):
        changed = bytearray(part)
        changed[generator.randrange(length)] ^= 1 << generator.randrange(8)
        with pytest.raises(DamagedError):
            read_record(memoryview(head + changed))
        page = 4096 * generator.randrange(length // 4096)
        torn = part[:page] + generator.randbytes(4096) + part[page + 4096 :]
        with pytest.raises(DamagedError):
            read_record(memoryview(head + torn))
    if length > 2 * 8 * 4096:
        swapped = part[32768:65536] + part[:32768] + part[65536:]
        with pytest.raises(DamagedError):
            read_record(memoryview(head + swapped))


@pytest.mark.parametrize("distance", [1, 2, 7, 8, 100])
def test_pages_and_blocks_that_have_changed_places_are_damage(distance):
    part = random.Random(1).randbytes(128 * 4096)
    head = record_head({}, [part])
    for size in (4, 8, 512, 4096):
        for first in (0, size, 3 * size):
            one, other = (
                slice(first, first + size),
                slice(first + distance * size, first + (distance + 1) * size),
            )
            changed = bytearray(part)
            changed[one], changed[other] = changed[other], changed[one]
            with pytest.raises(DamagedError):
                read_record(memoryview(head + changed))


@pytest.mark.parametrize("bit", [0, 31, 63])
def test_the_same_bits_of_two_words_are_damage(bit):
    part = random.Random(2).randbytes(64 * 4096)
    head = record_head({}, [part])
    for first, second in ((0, 1), (0, 4096), (100, 4095), (4095, 4096), (0, 32767)):
        changed = bytearray(part)
        for word in (first, second):
            changed[8 * word + bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            read_record(memoryview(head + changed))


def test_sections_that_have_changed_places_are_damage():
    parts = [b"a" * 50_000, b"b" * 50_000]
    with pytest.raises(DamagedError):
        read_record(memoryview(record_head({}, parts) + parts[1] + parts[0]))


def test_what_an_earlier_version_wrote_is_called_so():
    whole = b"AFL1" + record_head({}, [b"content"])[4:] + b"content"
    with pytest.raises(OtherVersionError, match="written by an earlier version of afl"):
        read_record(memoryview(whole))


@pytest.mark.parametrize("magic", [b"AFL1", b"AFL2"])
def test_a_magic_before_zeros_is_damage(magic):
    with pytest.raises(DamagedError):
        read_record(memoryview(magic + bytes(4096)))


def test_the_next_whole_record_is_found_behind_whatever_is_not():
    whole = record_head({"a": 1}, [b"content"]) + b"content"
    found = next_record(memoryview(b"AFL2" + whole[:-1] + b"AFL2AFL" + whole + whole), 2)
    assert found is not None
    assert found[0] == 4 + len(whole) - 1 + 7
    assert found[1].values == {"a": 1}
    assert next_record(memoryview(whole + whole), 1) is not None
    assert next_record(memoryview(whole + whole[:-1]), 1) is None


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "file"
    write_whole(path, b"one", b"two")
    assert path.read_bytes() == b"onetwo"

    def break_off() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise InterruptedError

    with pytest.raises(InterruptedError):
        break_off()
    assert path.read_bytes() == b"onetwo"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_lock_is_one_processs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(durable, "LOCK_PATIENCE_S", 0.0)
    first = lock(tmp_path / "lock", "the folder")
    holder = rf"the folder is in use by another process \(process {os.getpid()}\)"
    with pytest.raises(InUseError, match=holder) as raised:
        lock(tmp_path / "lock", "the folder")
    assert raised.value.exit_code is ExitCode.IN_USE
    unlock(first)
    unlock(lock(tmp_path / "lock", "the folder"))


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lock"
    path.touch()
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as no_locks:
        no_locks.setattr(durable.fcntl, "flock", _without_locks)
        with pytest.raises(OSError, match="its file system has no file locks") as caught:
            lock(path, "the folder")
        assert not is_locked(path)
    assert (caught.value.errno, caught.value.filename) == (errno.EOPNOTSUPP, str(path))
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def _without_locks(*_: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_a_lock_that_is_given_back_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = lock(tmp_path / "lock", "the folder")
    monkeypatch.setattr(durable.time, "sleep", lambda _: unlock(first))
    unlock(lock(tmp_path / "lock", "the folder"))


def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        folder = tmp_path / "runs" / "one"
        durable.own_folder(folder)
        durable.own_folder(folder)
        write_whole(folder / "config.yaml", b"seed: 7")
        unlock(lock(folder / "lock", "it"))
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600, 0o600]
