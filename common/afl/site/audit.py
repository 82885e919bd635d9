"""The log of what left a site: JSON lines that are only added, each with the SHA-256 of the line before.

Whoever holds the hash of a line can tell whether anything up to it was changed, taken out or put in. What was
cut off at the end leaves no trace in the file: note the last hash elsewhere.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from afl.errors import DISK_FULL, DataError, StorageError
from afl.paths import opened
from afl.runs.durable import sync_folder

BEGINNING: Final = "0" * 64
"""What a log begins with that goes on from no other."""

LONGEST_LINE: Final = 1 << 20
"""Bytes; one of a thousand workers has less than a tenth."""

PREVIOUS, KIND, CONTINUED = "previous", "kind", "continued"

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Link:
    """A line of a log: its entry, its hash, and where it ends."""

    number: int
    entry: Entry
    hash: str
    end: int


def links(file: BinaryIO, name: str, after: Link) -> Iterator[Link]:
    """The lines that follow the one before, each checked; a last line without its end is left out.

    Args:
        after: the line before; number 0 is before the first, which may go on from another log.

    Raises:
        DataError: at the first line that is not as it was when the next one was written.
    """
    number, previous, end = after.number, after.hash, after.end
    while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
        number += 1
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise DataError(f"{name}:{number}: not a line of an audit log ({error})") from error
        if not isinstance(entry, dict) or KIND not in entry or not isinstance(entry.get(PREVIOUS), str):
            raise DataError(f"{name}:{number}: not a line of an audit log")
        if number > 1 and entry[PREVIOUS] != previous:
            raise DataError(
                f"{name}:{number - 1}: this line was changed, or one after it was taken out or put in: its"
                f" hash is {previous}, and line {number} was written after {entry[PREVIOUS]}"
            )
        previous, end = hashlib.sha256(line[:-1]).hexdigest(), end + len(line)
        yield Link(number, entry, previous, end)
    if len(line) == LONGEST_LINE:
        raise DataError(f"{name}:{number + 1}: more than {LONGEST_LINE:,} bytes, which no line of it has")


NOTHING: Final = Link(0, {}, BEGINNING, 0)


class AuditLog:
    """A site's log. Several processes may add to one file: each goes on from the line that is then the last.

    Args:
        seen: told of every entry that is in the file, as it is read or added.
        cut: told how many bytes were cut off at the end, of a line that was not written to its end: what it
            would have said was not sent.

    Raises:
        StorageError: if the file cannot be used, or its lines do not follow from each other.
    """

    def __init__(self, path: Path, seen: Callable[[Entry], None], cut: Callable[[int], None]) -> None:
        self._path = path
        self._seen = seen
        self._cut = cut
        self.last = NOTHING
        self._file: tuple[int, int] | None = None
        with self._errors_named():
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(os.O_CREAT):
                pass
            sync_folder(path.parent)

    def add(self, entry: Entry) -> None:
        """Make an entry durable. Raises StorageError if that cannot be done; the log is as before."""
        with self._errors_named(), self._locked() as file:
            whole = _after(self.last, entry)
            text = _text(whole)
            try:
                if os.write(file, text + b"\n") <= len(text):
                    # The rest of it would be refused with this error.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
                os.fdatasync(file)
            except OSError:
                os.ftruncate(file, self.last.end)
                raise
            hash_, end = hashlib.sha256(text).hexdigest(), self.last.end + len(text) + 1
            self.last = Link(self.last.number + 1, whole, hash_, end)
            self._seen(whole)

    @contextlib.contextmanager
    def _locked(self, more: int = 0) -> Iterator[int]:
        """The file, which is this process's alone, read to its end."""
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | more, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            about = os.fstat(file)
            if self._file not in {None, (about.st_dev, about.st_ino)} or about.st_size < self.last.end:
                raise StorageError(
                    f"{self._path} is another file than before, or shorter; a log is put aside between two "
                    "starts only (docs/policy.md)"
                )
            self._file = about.st_dev, about.st_ino
            if about.st_size > self.last.end:
                self._read(file, about.st_size)
            yield file
        finally:
            # A process that is just being forked may have the descriptor too.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _read(self, file: int, size: int) -> None:
        with os.fdopen(os.dup(file), "rb") as lines:
            lines.seek(self.last.end)
            for link in links(lines, str(self._path), self.last):
                self.last = link
                self._seen(link.entry)
        if size > self.last.end:
            os.ftruncate(file, self.last.end)
            os.fdatasync(file)
            self._cut(size - self.last.end)

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            raise StorageError(f"{error}; keep that file, and name another log in the policy") from error
        except OSError as error:
            is_full = error.errno in DISK_FULL
            raise StorageError(
                f"{self._path} cannot be used ({error.strerror}): nothing is sent that is not in the audit "
                f"log before; {'free some space' if is_full else 'name another file in the policy (audit)'}"
            ) from error


def read_log(path: Path, after: Link = NOTHING) -> Iterator[Link]:
    """The lines of a log, each checked.

    Args:
        after: the last line of the log that this one goes on from; its hash is what this one begins with.

    Raises:
        OSError: if the file cannot be read.
        DataError: at the first line that is not as it was when the next one was written, or is cut in the
            middle.
    """
    with opened(path) as file:
        last = NOTHING
        for link in links(file, str(path), last):
            if link.number == 1 and after.number and link.entry[PREVIOUS] != after.hash:
                raise DataError(f"{path}:1: this log does not go on from the one before it ({after.hash})")
            last = link
            yield link
        if file.tell() > last.end:
            raise DataError(
                f"{path}:{last.number + 1}: cut in the middle; a worker that uses the log cuts it off as it "
                "starts, since what it would say was not sent"
            )


def begin_after(last: Link, path: Path, before: Path) -> None:
    """A new log that goes on from ``last``, the last line of the log at ``before``."""
    with path.open("xb") as file:
        path.chmod(0o600)
        file.write(_text(_after(last, {KIND: CONTINUED, "from": before.name})) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _after(last: Link, entry: Entry) -> Entry:
    now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    return {PREVIOUS: last.hash, "time": now, **entry}


def _text(entry: Entry) -> bytes:
    # In ASCII: what a server names may not reach a terminal as it is.
    return json.dumps(entry, separators=(",", ":"), allow_nan=False).encode()


def digest_of(sections: Iterable[bytes | memoryview]) -> str:
    """SHA-256 of these bytes, one after the other."""
    total = hashlib.sha256()
    for section in sections:
        total.update(section)
    return total.hexdigest()
