"""A worker's journal: its last training report and all that its process knew after it, on disk before the
report is sent.

A file has two places for a record; the newer is never written over. A record's content comes first and its
head last, so that one that was torn is told from a whole one, and the other place still holds what was
before. Room is reserved when the file is made: a full disk is noticed then, not in the middle of a run.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.disk_usage import JOURNAL_SPARE
from afl.core.messages import Kind, Payload, PayloadHeader, Position, Report
from afl.core.participant import Kept
from afl.daemon import events
from afl.daemon.fault_points import reached
from afl.errors import ConfigError, StorageError
from afl.runs.durable import (
    DamagedError,
    InUseError,
    OtherVersionError,
    Record,
    Section,
    lock,
    packed_arrays,
    read_record,
    record_head,
    sync_folder,
    unpacked_arrays,
)

LOG = logging.getLogger("afl.worker")

HEAD_BYTES = 64 * 1024
"""Room for a record's head beyond that of the first: metrics and lengths vary."""


@dataclass(frozen=True)
class Owner:
    """What a journal belongs to: a run, a model layout and a worker."""

    run_id: str
    layout_hash: bytes
    worker: int

    def values(self) -> dict[str, Any]:
        """The owner as the journal's records hold it, in JSON."""
        return {"run_id": self.run_id, "layout": self.layout_hash.hex(), "worker": self.worker}


class Journal:
    """One worker's, which is this process's alone until :meth:`close`.

    Args:
        path: the file; made at the first record.
        syncs: whether a record is on the disk, and not only in the system's memory, before :meth:`write`
            returns.

    Raises:
        InUseError: if another process has it.
        StorageError: if it cannot be opened.
        ConfigError: if it is another worker's, or of another model.
    """

    def __init__(self, path: Path, owner: Owner, *, syncs: bool) -> None:
        self._path = path
        self._owner = owner
        self._syncs = syncs
        self._map: mmap.mmap | None = None
        self._room = 0
        """Bytes of one of the two places."""
        self._sequence = 0
        try:
            _make_folder(path.parent, syncs=syncs)
            self._lock = lock(path.with_suffix(".lock"), f"worker {owner.worker}'s journal")
        except OSError as error:
            raise self._failure(error) from error

    def read(self) -> Kept | None:
        """The newest whole entry, if there is one.

        Raises:
            ConfigError: if the journal is another worker's, of another model, or another version's.
            StorageError: if it cannot be read.
        """
        try:
            self._open()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure(error) from error
        found: list[Record] = []
        damaged: list[str] = []
        for place in range(2 if self._room else 0):
            start = place * self._room
            view = self._view()[start : start + self._room]
            try:
                found.append(read_record(view))
            except OtherVersionError as error:
                raise ConfigError(
                    f"{self._path} cannot be used: {error}; resume the run with that version, or name "
                    "another directory with --journal: the worker then begins without its residual"
                ) from error
            except DamagedError as error:
                # A place that was never written to is zero.
                if any(view[:HEAD_BYTES]):
                    damaged.append(str(error))
        size = 0 if self._map is None else len(self._map)
        lengths = {int(record.values["journal_bytes"]) for record in found}
        if lengths and lengths != {size}:
            damaged.append(f"the file has {size} bytes where it had {max(lengths)}")
        elif not found and not damaged:
            damaged.append(f"none in {size} bytes")
        if damaged:
            LOG.warning(
                "%s holds an incomplete entry (%s); %s",
                self._path,
                "; ".join(damaged),
                "the entry before it is used" if found else "the journal is ignored",
                extra=events.JournalDamaged(worker=self._owner.worker).extra,
            )
        if not found:
            return None
        newest = max(found, key=lambda record: int(record.values["sequence"]))
        self._require_own(newest)
        self._sequence = int(newest.values["sequence"])
        return _kept(newest)

    def write(self, kept: Kept) -> None:
        """Make an entry durable.

        Raises:
            StorageError: if it cannot be written; the last entry still stands.
        """
        reached("worker.before-journal")
        values, sections = self._packed(kept)
        head = record_head(values, sections)
        length = len(head) + sum(map(len, sections))
        try:
            if length > self._room:
                room = _room_for(length)
                self._replace(room, record_head({**values, "journal_bytes": 2 * room}, sections), sections)
            else:
                start = (self._sequence + 1) % 2 * self._room
                self._put(start + len(head), sections)
                if self._syncs:
                    self._flush()
                reached("worker.mid-journal")
                self._put(start, [head])
                if self._syncs:
                    self._flush()
        except OSError as error:
            raise self._failure(error) from error
        self._sequence += 1
        reached("worker.after-journal")

    def close(self) -> None:
        """Unmap the file and release its lock."""
        self._unmap()
        os.close(self._lock)

    def remove(self) -> None:
        """The run is complete: nothing will go on from here."""
        self._unmap()
        self._path.unlink(missing_ok=True)
        self._path.with_suffix(".new").unlink(missing_ok=True)
        self._path.with_suffix(".lock").unlink(missing_ok=True)
        os.close(self._lock)

    # Inner workings.

    def _packed(self, kept: Kept) -> tuple[dict[str, Any], list[Section]]:
        report = kept.report
        arrays: dict[str, NDArray[Any]] = {} if kept.residual is None else {"residual": kept.residual}
        arrays |= {f"buffers.{name}": array for name, array in kept.buffers.items()}
        described, sections = packed_arrays(arrays)
        values = {
            **self._owner.values(),
            "sequence": self._sequence + 1,
            "journal_bytes": 2 * self._room,
            "kind": kept.kind.name,
            "position": list(report.position),
            "loss": report.loss,
            "examples": report.examples,
            "weight": report.weight,
            "missing": report.missing,
            "payloads": [asdict(payload.header) for payload in kept.payloads],
            "arrays": described,
        }
        return values, [*(payload.data for payload in kept.payloads), *sections]

    def _require_own(self, record: Record) -> None:
        for name, own in self._owner.values().items():
            found = record.values[name]
            if found != own:
                what = "another model" if name == "layout" else f"{name.replace('_', ' ')} {found}, not {own}"
                raise ConfigError(
                    f"{self._path} is the journal of {what}; name another directory with --journal, or "
                    "remove the file"
                )

    def _open(self) -> None:
        handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if size:
                self._map = mmap.mmap(handle, size)
            self._room = size // 2
        finally:
            os.close(handle)

    def _replace(self, room: int, head: bytes, sections: Sequence[Section]) -> None:
        """A larger file that holds the entry takes the journal's place."""
        temporary = self._path.with_suffix(".new")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, 2 * room)
            fresh = mmap.mmap(handle, 2 * room)
        finally:
            os.close(handle)
        self._unmap()
        self._map, self._room = fresh, room
        start = (self._sequence + 1) % 2 * room
        self._put(start + len(head), sections)
        reached("worker.mid-journal")
        self._put(start, [head])
        self._flush()
        temporary.replace(self._path)
        sync_folder(self._path.parent)

    def _put(self, start: int, sections: Sequence[Section]) -> None:
        target: NDArray[np.uint8] = np.frombuffer(self._view(), dtype=np.uint8)
        for section in filter(len, sections):
            stop = start + len(section)
            np.copyto(target[start:stop], np.frombuffer(section, dtype=np.uint8))
            start = stop

    def _view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def _flush(self) -> None:
        assert self._map is not None
        self._map.flush()

    def _unmap(self) -> None:
        # Arrays that were read may still look at it; the last of them frees it.
        self._map = None

    def _failure(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self._path} cannot be used ({error.strerror}): the journal must be written before anything is "
            "sent; name another directory with --journal, or turn it off in the run (worker.journal: off)"
        )


class Journals:
    """Those of a process's workers: ``folder/RUN_ID/worker-ID.journal``.

    Args:
        level: ``process``, ``machine``, or ``off``, which keeps nothing.
    """

    def __init__(
        self, folder: Path, run_id: str, layout_hash: bytes, workers: Sequence[int], level: str
    ) -> None:
        self._folder = folder / run_id
        self._own: dict[int, Journal] = {}
        for worker in workers if level != "off" else ():
            path = self._folder / f"worker-{worker}.journal"
            try:
                self._own[worker] = Journal(
                    path, Owner(run_id, layout_hash, worker), syncs=level == "machine"
                )
            except (StorageError, InUseError):
                self.close()
                raise

    def read(self) -> Mapping[int, Kept]:
        """The newest entry of each worker that has one."""
        found = {worker: journal.read() for worker, journal in self._own.items()}
        return {worker: kept for worker, kept in found.items() if kept is not None}

    def write(self, kept: Kept) -> None:
        """Make a worker's entry durable."""
        if self._own:
            self._own[kept.report.worker].write(kept)

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return bool(self._own)

    def close(self) -> None:
        """Unmap all files and release their locks."""
        for journal in self._own.values():
            journal.close()
        self._own = {}

    def remove(self) -> None:
        """Remove the journals of a run that is complete."""
        if not self._own:
            return
        for journal in self._own.values():
            journal.remove()
        self._own = {}
        # Another process's journals, or another run's, may still lie there.
        with contextlib.suppress(OSError):
            self._folder.rmdir()
            self._folder.parent.rmdir()


def remove_left_behind(folder: Path, run_id: str, workers: Sequence[int]) -> None:
    """Remove what processes of these workers left of a run that is complete, but for what is in use."""
    for worker in workers:
        if any((folder / run_id).glob(f"worker-{worker}.*")):
            # Nothing but room on the disk depends on it.
            with contextlib.suppress(StorageError, InUseError):
                Journals(folder, run_id, b"", [worker], "process").remove()


def _room_for(length: int) -> int:
    """Bytes of a place for entries of about this length: index sections and signs vary in length."""
    return -(-(length + length // JOURNAL_SPARE + HEAD_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _make_folder(folder: Path, *, syncs: bool) -> None:
    """A folder that is there after a loss of power too, if it must be."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if syncs:
        # Its own entry in any case: who made it may not have come so far.
        for parent in dict.fromkeys([folder.parent, *(part.parent for part in missing)]):
            sync_folder(parent)


def _kept(record: Record) -> Kept:
    values = record.values
    headers = [PayloadHeader.of_values(entry) for entry in values["payloads"]]
    # A copy: the place is written over by the entry after the next.
    owned = [memoryview(bytes(section)) for section in record.sections]
    arrays = unpacked_arrays(values["arrays"], owned[len(headers) :])
    prefix = "buffers."
    report = Report(
        worker=values["worker"],
        position=Position(*values["position"]),
        loss=values["loss"],
        examples=values["examples"],
        payloads=tuple(headers),
        weight=values["weight"],
        missing=values["missing"],
    )
    return Kept(
        Kind[values["kind"]],
        report,
        tuple(Payload(header, (section,)) for header, section in zip(headers, owned, strict=False)),
        arrays.get("residual"),
        {name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)},
    )
