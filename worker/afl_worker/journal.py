"""A worker's journal: its last training report and all that its process knew after it, on disk before the
report is sent.

A file has two places for a record; the newer is never written over. A record's content comes first and its
head last, so that one that was torn is told from a whole one, and the other place still holds what was
before. Room is reserved when the file is made: a full disk is noticed then, not in the middle of a run.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from afl.core.disk_usage import JOURNAL_SPARE
from afl.core.messages import Kind, Payload, PayloadHeader, Position, Report
from afl.core.participant import Kept
from afl.daemon import events
from afl.daemon.fault_points import reached
from afl.errors import DISK_FULL, ConfigError, StorageError
from afl.paths import from_start, kind_of
from afl.runs import durable
from afl.runs.durable import DamagedError, InUseError, OtherVersionError, Record, Section

LOG = logging.getLogger("afl.worker")

HEAD_BYTES = 64 * 1024
"""Room for a record's head beyond that of the first: metrics and lengths vary."""

_OF_REPORT = ("loss", "examples", "weight", "missing")
_PRIVATE = ("private_steps", "private_terms")
_BUFFERS = "buffers."

KEYS_SUFFIX = ".keys"
"""Of a worker's keys, which lie beside its journal and go with it."""


@dataclass(frozen=True)
class Owner:
    """What a journal belongs to: a run, a model layout (its hash in hexadecimal) and a worker."""

    run_id: str
    layout: str
    worker: int


class Journal:
    """One worker's, which is this process's alone until :meth:`close`.

    Args:
        path: the file; made at the first record.
        syncs: whether a record is on the disk, and not only in the system's memory, before :meth:`write`
            returns.

    Raises:
        InUseError: if another process has it.
        StorageError: if it cannot be opened.
    """

    def __init__(self, path: Path, owner: Owner, *, syncs: bool) -> None:
        self._path = path
        self._owner = owner
        self._syncs = syncs
        self._file: int | None = None
        self._room = 0
        """Bytes of one of the two places."""
        self._sequence = 0
        self.may_lack_newest = False
        """Whether an entry was lost that may be newer than the one read: it may have been sent."""
        with _errors_named(self._path):
            _make_folder(path.parent, syncs=syncs)
            self._lock = durable.lock(path.with_suffix(".lock"), f"worker {owner.worker}'s journal")

    def read(self) -> Kept | None:
        """The newest whole entry, if there is one.

        Raises:
            ConfigError: if the journal is another worker's, of another model, or another version's.
            StorageError: if it cannot be read.
        """
        with _errors_named(self._path):
            if not self._path.exists():
                return None
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            content = memoryview(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) if size else b"")
        self._room = size // 2
        found: list[Record] = []
        damaged: list[str] = []
        lost: list[int | None] = []
        for start in (0, self._room) if self._room else ():
            place = content[start : start + self._room]
            try:
                found.append(durable.read_record(place))
            except OtherVersionError as error:
                raise ConfigError(
                    f"{self._path} cannot be used: {error}; resume the run with that version, or name "
                    "another directory with --journal: the worker then begins without its residual"
                ) from error
            except DamagedError as error:
                # A place that was never written to is zero.
                if any(place[:HEAD_BYTES]):
                    damaged.append(str(error))
                    lost.append(error.values.get("sequence"))
        lengths = {int(record.values["journal_bytes"]) for record in found}
        if lengths and lengths != {size}:
            lost.append(None)
            damaged.append(f"the file has {size} bytes where it had {max(lengths)}")
        elif not found and not damaged:
            damaged.append(f"none in {size} bytes")
        if damaged:
            used = "the entry before it is used" if found else "the journal is ignored"
            event = events.JournalDamaged(worker=self._owner.worker)
            why = "; ".join(damaged)
            LOG.warning("%s holds an incomplete entry (%s); %s", self._path, why, used, extra=event.extra)
        if not found:
            self.may_lack_newest = bool(damaged)
            return None
        newest = max(found, key=lambda record: int(record.values["sequence"]))
        self._require_own(newest)
        self._sequence = int(newest.values["sequence"])
        # A write that is cut off before its head leaves that of the entry before the newest.
        self.may_lack_newest = any(number is None or number > self._sequence for number in lost)
        return _kept(newest)

    def write(self, kept: Kept) -> None:
        """Make an entry durable. Raises StorageError if it cannot be written; the last entry still stands."""
        reached("worker.before-journal")
        arrays = {_BUFFERS + name: array for name, array in kept.buffers.items()}
        described, sections = durable.packed_arrays({**kept.state, **arrays})
        sections = [*(payload.data for payload in kept.payloads), *sections]
        values = {
            **vars(self._owner),
            "sequence": self._sequence + 1,
            "journal_bytes": 2 * self._room,
            "kind": kept.kind.name,
            "position": list(kept.report.position),
            **{name: getattr(kept.report, name) for name in _OF_REPORT},
            "metrics": dict(kept.report.metrics),
            "model_digest": kept.report.model_digest.hex(),
            "history": kept.report.history.hex(),
            "payloads": [vars(payload.header) for payload in kept.payloads],
            "arrays": described,
            **({name: getattr(kept, name) for name in _PRIVATE} if kept.private_steps else {}),
        }
        head = durable.record_head(values, sections)
        length = len(head) + sum(map(len, sections))
        grows = length > self._room
        with _errors_named(self._path):
            if grows:
                self._make_larger(length)
                head = durable.record_head({**values, "journal_bytes": 2 * self._room}, sections)
            assert self._file is not None
            start = values["sequence"] % 2 * self._room
            _write(self._file, start + len(head), sections)
            if self._syncs:
                os.fdatasync(self._file)
            reached("worker.mid-journal")
            _write(self._file, start, [head])
            if self._syncs or grows:
                os.fdatasync(self._file)
            if grows:
                self._path.with_suffix(".new").replace(self._path)
                durable.sync_folder(self._path.parent)
        self._sequence += 1
        reached("worker.after-journal")

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            os.close(self._file)
        durable.unlock(self._lock)

    def remove(self) -> None:
        """Remove the file and release its lock."""
        # Nothing but room on the disk depends on it.
        with contextlib.suppress(OSError):
            for suffix in (".journal", ".new", KEYS_SUFFIX, ".lock"):
                self._path.with_suffix(suffix).unlink(missing_ok=True)
        self.close()

    def _require_own(self, record: Record) -> None:
        for name, own in asdict(self._owner).items():
            found = record.values[name]
            if found != own:
                what = "another model" if name == "layout" else f"{name.replace('_', ' ')} {found}, not {own}"
                raise ConfigError(
                    f"{self._path} is the journal of {what}; name another directory with --journal, or "
                    "remove the file"
                )

    def _make_larger(self, length: int) -> None:
        """Make a file for entries of about this length: index sections and signs vary in length. It takes
        the journal's place once there is an entry in it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fresh = os.open(self._path.with_suffix(".new"), flags, 0o600)
        if self._file is not None:
            os.close(self._file)
        self._file, self._room = fresh, 0
        pages = -(-(length + length // JOURNAL_SPARE + HEAD_BYTES) // mmap.PAGESIZE)
        os.posix_fallocate(fresh, 0, 2 * pages * mmap.PAGESIZE)
        self._room = pages * mmap.PAGESIZE


@contextlib.contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "name another directory with --journal, or turn it off in the run (worker.journal: off)"
        raise StorageError(
            f"{path} cannot be used ({error.strerror}): the journal must be written before "
            f"anything is sent; {'free some space' if error.errno in DISK_FULL else advice}"
        ) from error


def check_folder(folder: Path) -> None:
    """Raise StorageError if no journal can be in a folder, as far as is known before there is one. Nothing is
    made there: the run may keep none."""
    folder = from_start(folder)
    with _errors_named(folder):
        there = next(path for path in (folder, *folder.parents) if kind_of(path))
        if kind_of(there) != "folder":
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class Journals:
    """Those of a process's workers, ``folder/RUN_ID/worker-ID.journal``, which must survive the end of the
    ``process`` or of the ``machine`` (``level``)."""

    def __init__(
        self, folder: Path, run_id: str, layout_hash: bytes, workers: Sequence[int], level: str
    ) -> None:
        self._folder = from_start(folder) / run_id
        self._own: dict[int, Journal] = {}
        for worker in workers:
            path = self._folder / f"worker-{worker}.journal"
            owner = Owner(run_id, layout_hash.hex(), worker)
            try:
                self._own[worker] = Journal(path, owner, syncs=level == "machine")
            except (StorageError, InUseError):
                self.close()
                raise

    def read(self) -> Mapping[int, Kept]:
        """The newest entry of each worker that has one."""
        found = {worker: journal.read() for worker, journal in self._own.items()}
        return {worker: kept for worker, kept in found.items() if kept is not None}

    def lacks_newest(self) -> list[int]:
        """Workers of which the newest entry may be lost."""
        return [worker for worker, journal in self._own.items() if journal.may_lack_newest]

    def write(self, kept: Kept) -> None:
        """Make a worker's entry durable."""
        self._own[kept.report.worker].write(kept)

    def close(self) -> None:
        """Close all files and release their locks."""
        for journal in self._own.values():
            journal.close()

    def remove(self) -> None:
        """Remove the journals of a run that is complete: nothing will go on from here."""
        for journal in self._own.values():
            journal.remove()
        # Another process's journals, or another run's, may still lie there.
        with contextlib.suppress(OSError):
            self._folder.rmdir()
            self._folder.parent.rmdir()


def remove_left_behind(folder: Path, run_id: str, workers: Sequence[int]) -> None:
    """Remove what processes of these workers left of a run that is complete, but for what is in use."""
    for worker in workers:
        with contextlib.suppress(OSError, StorageError, InUseError):
            if any((from_start(folder) / run_id).glob(f"worker-{worker}.*")):
                Journals(folder, run_id, b"", [worker], "process").remove()


def _make_folder(folder: Path, *, syncs: bool) -> None:
    """A folder that is there after a loss of power too, if it must be."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    durable.own_folder(folder)
    if syncs:
        # Its own entry in any case: who made it may not have come so far.
        for parent in dict.fromkeys([folder.parent, *(part.parent for part in missing)]):
            durable.sync_folder(parent)


def _write(file: int, start: int, sections: Sequence[Section]) -> None:
    for section in sections:
        left = memoryview(section)
        while left:
            written = os.pwrite(file, left, start)
            start, left = start + written, left[written:]


def _kept(record: Record) -> Kept:
    values = record.values
    headers = [PayloadHeader.of_values(entry) for entry in values["payloads"]]
    # A copy: the place is written over by the entry after the next.
    owned = [memoryview(bytes(section)) for section in record.sections]
    arrays = durable.unpacked_arrays(values["arrays"], owned[len(headers) :])
    return Kept(
        Kind[values["kind"]],
        Report(
            values["worker"],
            Position(*values["position"]),
            payloads=tuple(headers),
            metrics=values["metrics"],
            model_digest=bytes.fromhex(values["model_digest"]),
            history=bytes.fromhex(values.get("history", "")),
            **{name: values[name] for name in _OF_REPORT},
        ),
        tuple(Payload(header, (section,)) for header, section in zip(headers, owned, strict=False)),
        {name: array for name, array in arrays.items() if not name.startswith(_BUFFERS)},
        {name.removeprefix(_BUFFERS): array for name, array in arrays.items() if name.startswith(_BUFFERS)},
        **{name: values[name] for name in _PRIVATE if name in values},
    )
