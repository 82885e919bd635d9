"""Records that survive: a header of JSON and raw sections, framed and checksummed, at any place of a file.

A record is ``magic, header length, checksum of the header, header, section, section, ...``; the header holds
the sections' lengths and their checksum. Whatever was torn, overwritten in part or changed since is told
from a whole record: up to two bits and anything within 32 bits for certain, all else but once in 2^32. A
checksum can be made by anyone; a record that is sealed also ends its header with a code that takes a key.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from afl.errors import AflError, ExitCode

try:
    # The same checksum at many times the speed, with the processor's own instructions (the extra `fast`).
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

_PREFIX = struct.Struct("<4sII")
_MAGIC = b"AFL2"
_EARLIER_MAGICS = frozenset({b"AFL1"})  # of versions whose checksums did not see everything
MAX_HEADER_BYTES = 64 * 1024 * 1024
Section: TypeAlias = bytes | memoryview

OWNER_ONLY = 0o600
"""For whom a run's files are made: its configuration has the seed, its models what was trained."""

LOCK_PATIENCE_S = 5.0
"""How long to wait for a lock: a process that was killed a moment ago may still be ending."""

LOCK_PAUSE_S = 0.1


class DamagedError(AflError):
    """A record that is not whole: torn, cut short, or changed.

    Attributes:
        values: the record's, where its header is whole.
    """

    exit_code = ExitCode.STORAGE

    def __init__(self, message: str, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.values = values or {}


class CutShortError(DamagedError):
    """A record whose end is not there: what a write that was cut off leaves."""


class OtherVersionError(AflError):
    """A record that another version of afl has written."""

    exit_code = ExitCode.STORAGE


class InUseError(AflError):
    """A file or folder that another process has locked."""

    exit_code = ExitCode.IN_USE


@dataclass(frozen=True)
class Record:
    """A whole record: what its header says, as JSON has it, its raw sections, its length in bytes, and
    whether it is sealed."""

    values: Mapping[str, Any]
    sections: tuple[memoryview, ...]
    length: int
    is_sealed: bool = False


@dataclass(frozen=True)
class Seal:
    """Makes records that only who has the key can make: HMAC-SHA256 (RFC 2104) of what they hold.

    Attributes:
        context: what the record is for; in another place it does not count.
    """

    key: bytes = field(repr=False)
    context: str

    def suffix(self, body: bytes, sections: Sequence[Section]) -> bytes:
        """What a header ends with that else were ``body``."""
        code = hmac.new(self.key, f"afl {self.context} {len(body)} ".encode() + body, hashlib.sha256)
        for section in sections:
            code.update(section)
        return f',"mac":"{code.hexdigest()}"}}'.encode()


_SUFFIX_BYTES = len(',"mac":""}') + 2 * hashlib.sha256().digest_size


def _checksum(sections: Sequence[Section]) -> int:
    return reduce(lambda before, section: crc32(section, before), sections, 0)


def record_head(values: Mapping[str, Any], sections: Sequence[Section], seal: Seal | None = None) -> bytes:
    """What stands before the sections; written with them, or last of all."""
    lengths = [len(section) for section in sections]
    header = json.dumps(
        {"values": values, "lengths": lengths, "checksum": _checksum(sections)}, separators=(",", ":")
    ).encode()
    if seal is not None:
        header = header[:-1] + seal.suffix(header, sections)
    assert len(header) <= MAX_HEADER_BYTES
    return _PREFIX.pack(_MAGIC, len(header), crc32(header)) + header


def read_record(data: memoryview, start: int = 0, seal: Seal | None = None) -> Record:
    """The record that begins at byte ``start``; its sections share ``data``'s memory.

    Args:
        seal: that it must have; ``None`` for any or none.

    Raises:
        OtherVersionError: if it is a record of an earlier version.
        CutShortError: if ``data`` ends before the record does.
        DamagedError: if there is no whole record for another reason.
    """
    if start + _PREFIX.size > len(data):
        raise CutShortError("the record's beginning is cut short")
    magic, length, checksum = _PREFIX.unpack_from(data, start)
    if magic != _MAGIC and magic not in _EARLIER_MAGICS:
        raise DamagedError("no record begins here")
    position = start + _PREFIX.size
    # No header at all would have the checksum 0: what is written to a disk in part may be zero.
    if not 0 < length <= MAX_HEADER_BYTES:
        raise DamagedError("the record's beginning is not as it was written")
    if position + length > len(data):
        raise CutShortError("the record's header is cut short")
    header = bytes(data[position : position + length])
    if crc32(header) != checksum:
        raise DamagedError("the record's header is not as it was written")
    if magic != _MAGIC:
        raise OtherVersionError("it was written by an earlier version of afl")
    content = _parsed(header)
    position += length
    end = position + sum(content["lengths"])
    if end > len(data):
        raise CutShortError("the record's content is cut short")
    whole = data[position:end]
    if _checksum([whole]) != content.get("checksum"):
        raise DamagedError("the record's content is not as it was written", content["values"])
    if seal is not None:
        body = header[:-_SUFFIX_BYTES] + b"}"
        if not hmac.compare_digest(header[-_SUFFIX_BYTES:], seal.suffix(body, [whole])):
            raise DamagedError("it does not have the seal of this run's key: changed, or of another key")
    # Only now as many objects as the header names.
    ends = accumulate(content["lengths"], initial=0)
    sections = tuple(whole[first:last] for first, last in pairwise(ends))
    return Record(content["values"], sections, end - start, "mac" in content)


def _parsed(header: bytes) -> dict[str, Any]:
    """A header with a right checksum, which whoever made it may have filled with anything."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        content = json.loads(header)
        if all(type(size) is int and size >= 0 for size in content["lengths"]):
            return {**content, "values": dict(content["values"])}
    raise DamagedError("the record's header is none")


def next_record(data: memoryview, start: int) -> tuple[int, Record] | None:
    """The first whole record that begins at byte ``start`` or later, and where; ``None`` if none does."""
    for match in re.finditer(_MAGIC, data[start:]):
        with contextlib.suppress(DamagedError):
            place = start + match.start()
            return place, read_record(data, place)
    return None


Described: TypeAlias = Sequence[tuple[str, str, list[int]]]  # name, type and shape of arrays


def packed_arrays(arrays: Mapping[str, NDArray[Any]]) -> tuple[Described, list[Section]]:
    """What a header says of arrays, and their sections, which share their memory."""
    plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    described = [(name, array.dtype.str, list(array.shape)) for name, array in plain.items()]
    return described, [array.reshape(-1).view(np.uint8).data for array in plain.values()]


def unpacked_arrays(described: Described, sections: Sequence[memoryview]) -> dict[str, NDArray[Any]]:
    """The arrays again, which share the sections' memory."""
    return {
        name: np.frombuffer(section, dtype=np.dtype(kind)).reshape(shape)
        for (name, kind, shape), section in zip(described, sections, strict=True)
    }


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = OWNER_ONLY) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place, whole and synced, once it is written.

    ``mode`` says who may read it; until it is written, nobody else.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, *parts: Section, mode: int = OWNER_ONLY) -> None:
    """A file that holds ``parts``, or is as before: :class:`OSError` if it cannot be written."""
    with replacing(path, mode=mode) as temporary, temporary.open("wb") as file:
        for part in parts:
            file.write(part)


def own_folder(folder: Path) -> None:
    """Make a folder that its owner alone may enter; one that is there stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make names that were made or removed in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(path: Path, what: str) -> int:
    """A descriptor of the file or folder, which is this process's, and not its children's, until
    :func:`unlock` or the end of the process.

    :class:`InUseError` if another process keeps it for :data:`LOCK_PATIENCE_S`.
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        # Anew each time: whoever has it may remove the file.
        handle = os.open(path, flags | os.O_CLOEXEC, OWNER_ONLY)
        _locks.add(handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(handle)
            _locks.discard(handle)
            os.close(handle)
            if not isinstance(error, BlockingIOError):
                why = f"its file system has no file locks ({error.strerror})"
                raise OSError(error.errno, why, str(path)) from error
            if time.monotonic() > deadline:
                raise InUseError(
                    f"{what} is in use by another process{holder}: {path} is locked; end that process, or "
                    "name another directory"
                ) from None
            time.sleep(LOCK_PAUSE_S)
        else:
            # A folder has no content, and on a full disk the lock holds without it.
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            return handle


def unlock(handle: int) -> None:
    """Give back what :func:`lock` took."""
    _locks.discard(handle)
    # A process that is just being forked may have the descriptor too.
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _holder(handle: int) -> str:
    try:
        return f" (process {int(os.pread(handle, 20, 0))})"
    except (OSError, ValueError):
        return ""


def _close_locks() -> None:
    for handle in _locks:
        os.close(handle)
    _locks.clear()


_locks: set[int] = set()
# A forked child, such as a DataLoader's, may outlive this process, and would keep its locks.
os.register_at_fork(after_in_child=_close_locks)


def is_locked(path: Path) -> bool:
    """Whether another process has the file or folder, as :func:`lock` takes it.

    Whoever takes it at the very instant of the question is told that it is in use.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # Its file system has no locks, so nobody holds one.
        return False
    finally:
        os.close(handle)
    return False
