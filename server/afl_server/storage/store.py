"""A run's durable state: checkpoints, and a log of the outcome of every step since.

``checkpoint-N`` holds everything that step N begins with, N steps having been closed; ``log-N`` the outcomes
of steps N, N+1 and so on. The last two checkpoints are kept with their logs, so that a damaged newest one
costs nothing: the one before it and both logs lead to the same place.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from afl.config.schema import Durability
from afl.core.algorithms.base import Arrays
from afl.core.disk_usage import largest_log
from afl.core.messages import Kind, Payload, PayloadHeader, Position, Step
from afl.core.rounds.results import Evaluation, Outcome
from afl.daemon import events
from afl.daemon.fault_points import reached
from afl.errors import AflError, StorageError, cannot_begin, why_unwritten
from afl.paths import plain_file
from afl.runs import durable
from afl.runs.durable import DamagedError, Record, Section

LOG = logging.getLogger("afl.server")

FORMAT = 1

FROZEN_FILE = "frozen"
"""The parameters that are not trained: the same in every checkpoint."""

ASIDE = ".damaged"
"""What is added to a log's name for what was cut from it."""

_NAME = re.compile(r"(checkpoint|log)-(\d{12})")


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the open step begins with.

    Attributes:
        sequence: how many steps were closed before it.
        values: JSON: the engine's state, counters, and where the records stand.
        arrays: the model, and the engine's arrays.
    """

    run_id: str
    sequence: int
    values: Mapping[str, Any]
    arrays: Arrays


@dataclass(frozen=True)
class Entry:
    """A closed step.

    Attributes:
        values: JSON: the counters when it was closed.
    """

    sequence: int
    outcome: Outcome
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loss:
    """Outcomes that were written and cannot be resumed from.

    Attributes:
        what: what is wrong.
        log: the first log that is concerned.
        position: the byte in it up to which all is well.
        readable: how many whole outcomes follow.
    """

    what: str
    log: int
    position: int
    readable: int


class RunStore:
    """The state folder of a run, which is this process's alone until :meth:`close`.

    Args:
        folder: made if it is not there.
        durability: what an appended outcome survives: the process's end (``process``), or also a loss of
            power (``machine``); not ``off``. Checkpoints survive both.
        key: seals all that is written; what does not have its seal is damaged.

    Raises:
        InUseError: if another process runs this run.
        ConfigError: if the folder cannot be made.
        StorageError: if a run's folder is there, and cannot be written.
    """

    def __init__(self, folder: Path, durability: Durability, key: bytes | None = None) -> None:
        self._folder = folder
        assert durability != "off"
        self._syncs = durability == "machine"
        self._key = key
        self._run_id = ""
        is_there = False
        try:
            is_there = folder.is_dir()
            durable.own_folder(folder)
            self._lock = durable.lock(folder / "lock", f"the run in {folder.parent}")
        except OSError as error:
            if is_there:
                raise StorageError(f"{folder} cannot be written: {why_unwritten(error)}") from error
            raise cannot_begin(folder, error) from error
        self._log = -1
        self._log_bytes = 0
        self._log_name = ""
        # Not made at each step: pathlib interns each name, and CPython's table of interned strings (100,000
        # with PyTorch's) is made anew, twice the size, once as many have come and gone as it had room for.
        self._log_limit = largest_log(0)
        self.loss: Loss | None = None
        """What reading the outcomes has found missing or damaged: known once the last of them is read."""

    # Writing; each raises a ``StorageError`` if it cannot be done.

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint under another name, and begin the log that follows it; no waiting for the disk.

        Returns:
            what :meth:`publish` takes.
        """
        described, sections = durable.packed_arrays(checkpoint.arrays)
        values = {
            "format": FORMAT,
            "run_id": checkpoint.run_id,
            "sequence": checkpoint.sequence,
            "arrays": described,
            **checkpoint.values,
        }
        temporary = self._path("checkpoint", checkpoint.sequence).with_suffix(".new")
        with self._failing(temporary.name):
            handle = _opened(temporary, os.O_TRUNC)
            try:
                written = _write(handle, [durable.record_head(values, sections, self._seal("checkpoint"))])
                reached("server.mid-checkpoint")
                written += _write(handle, sections)
            except OSError:
                # It would fill the disk still more.
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(handle)
        self._run_id = checkpoint.run_id
        self._begin_log(checkpoint.sequence)
        self._log_limit = largest_log(written)
        return temporary

    def publish(self, temporary: Path) -> None:
        """Make a written checkpoint the newest, once it is on the disk; then remove what is no longer
        needed."""
        with self._failing(temporary.name):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            reached("server.before-rename")
            temporary.replace(temporary.with_suffix(""))
            durable.sync_folder(self._folder)
            oldest = self._found("checkpoint")[-2:][0]
            for kind in ("checkpoint", "log"):
                for sequence in self._found(kind):
                    if sequence < oldest:
                        self._path(kind, sequence).unlink(missing_ok=True)
            # Of servers that were killed before theirs was published.
            for path in self._folder.glob("checkpoint-*.new"):
                path.unlink()

    def append(self, entry: Entry) -> None:
        """Add a closed step to the log, before anyone hears of it; the log is as before if it cannot be."""
        outcome = entry.outcome
        described, sections = durable.packed_arrays({"losses": outcome.losses, **outcome.unsent})
        values = {
            "sequence": entry.sequence,
            "position": outcome.step.position,
            "kind": outcome.step.kind.name,
            "arrays": described,
            "payload": outcome.payload and asdict(outcome.payload.header),
            "evaluation": outcome.evaluation and asdict(outcome.evaluation),
            **entry.values,
        }
        if outcome.payload is not None:
            sections += outcome.payload.sections
        with self._failing(self._log_name):
            try:
                written = _write(self._log, [durable.record_head(values, sections, self._seal("outcome"))])
                reached("server.mid-log")
                self._log_bytes += written + _write(self._log, sections)
                if self._syncs:
                    os.fdatasync(self._log)
            except OSError:
                # A record of which half is there would hide those that follow it.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._log, self._log_bytes)
                raise

    @property
    def is_due(self) -> bool:
        """Whether the log has grown so long that a checkpoint should follow."""
        return self._log_bytes > self._log_limit

    def keep_frozen(self, data: bytes) -> None:
        """Write the parameters that are not trained, once in the run's life."""
        path = self._folder / FROZEN_FILE
        if not path.exists():
            with self._failing(path.name):
                durable.write_whole(path, durable.record_head({}, [data], self._seal("frozen")), data)

    def frozen(self) -> bytes:
        """What :meth:`keep_frozen` wrote, unless it is gone or damaged."""
        path = self._folder / FROZEN_FILE
        try:
            return bytes(durable.read_record(_content(path), seal=self._seal("frozen")).sections[0])
        except (OSError, DamagedError) as error:
            raise StorageError(f"{path} cannot be used: {error}; restore it from a backup") from error

    def discard(self) -> None:
        """Remove the folder: no run came of it."""
        self.close()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()

    def close(self) -> None:
        """Give the folder back."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        durable.unlock(self._lock)

    # Reading.

    @property
    def is_empty(self) -> bool:
        """Whether no checkpoint has ever been completed."""
        return not self._found("checkpoint")

    def load(self) -> tuple[Checkpoint, Iterator[Entry]]:
        """The newest whole checkpoint, and the outcomes since, read one by one.

        What is damaged is logged, and passed over where that loses nothing. An outcome at the end that was
        not written whole is cut off; :attr:`loss` says what else is not as it was written.

        Raises:
            StorageError: if no checkpoint is whole, or the newest is another version's, or is sealed where no
            key is given.
        """
        damaged: list[Path] = []
        for sequence in reversed(self._found("checkpoint")):
            path = self._path("checkpoint", sequence)
            try:
                record = durable.read_record(_content(path), seal=self._seal("checkpoint"))
                if record.is_sealed and self._key is None:
                    raise StorageError(
                        f"{path} is sealed: give the key that it was written with, as server.integrity_key"
                    )
                with content_named(DamagedError, "its checksum is right and its content is not"):
                    checkpoint = _checkpoint(record)
            except durable.OtherVersionError as error:
                raise StorageError(
                    f"{path} cannot be used: {error}; resume the run with that version, or start a new "
                    "run in another directory"
                ) from error
            except (DamagedError, OSError) as error:
                LOG.error(  # noqa: TRY400  # the message says all
                    "%s cannot be used (%s); the checkpoint before it is taken",
                    path,
                    error,
                    extra=events.CheckpointDamaged(file=path.name).extra,
                )
                damaged.append(path)
                continue
            # Only whole ones count as the last two, which are kept.
            for path in damaged:
                self._rename_aside(path)
            self._run_id = checkpoint.run_id
            return checkpoint, self._entries(sequence)
        raise StorageError(
            f"no checkpoint in {self._folder} is whole: restore the folder from a backup, or start a new run "
            "in another directory"
        )

    def _entries(self, sequence: int) -> Iterator[Entry]:
        logs = [start for start in self._found("log") if start >= sequence]
        if sequence not in logs:
            # A checkpoint's log is begun before the checkpoint is there.
            self._lose(f"{self._path('log', sequence)} is not there", sequence)
            return
        for start in logs:
            path = self._path("log", start)
            if start > sequence:
                self._lose(f"{path} begins behind outcome {sequence}, which is missing", sequence)
                return
            content = self._read(path)
            position = 0
            while position < len(content):
                try:
                    record = durable.read_record(content, position, self._seal("outcome"))
                except DamagedError as error:
                    if start == logs[-1] and _is_torn(content, position, error):
                        self._cut(path, position, error)
                    else:
                        self._lose(f"{path} is damaged at byte {position}: {error}", start, position)
                    return
                try:
                    with content_named(DamagedError, "its checksum is right and its content is not"):
                        entry = _entry(record)
                except DamagedError as error:
                    self._lose(f"{path} is damaged at byte {position}: {error}", start, position)
                    return
                if entry.sequence != sequence:
                    what = f"{path} holds outcome {entry.sequence} where {sequence} should be"
                    self._lose(what, start, position)
                    return
                yield entry
                reached("server.mid-replay")
                sequence += 1
                position += record.length

    def _cut(self, path: Path, position: int, error: DamagedError) -> None:
        """Of the step whose outcome the log ends within nobody has heard."""
        with self._failing(path.name):
            os.truncate(path, position)
        LOG.warning(
            "%s ends with an outcome that was not written whole (%s); its step is open again",
            path,
            error,
            extra=events.LogCut(file=path.name).extra,
        )

    def _lose(self, what: str, log: int, position: int = 0) -> None:
        """Note what is wrong, and how much follows."""
        later = [self._read(self._path("log", start)) for start in self._found("log") if start > log]
        path = self._path("log", log)
        if path.exists():
            later.append(self._read(path)[position:])
        self.loss = Loss(what, log, position, sum(map(_whole_records, later)))

    def _set_aside(self) -> None:
        """Keep what cannot be resumed from beside the logs, which would write over it; told only once."""
        loss = self.loss
        if loss is None:
            return
        for start in self._found("log"):
            if start > loss.log:
                self._rename_aside(self._path("log", start))
        path = self._path("log", loss.log)
        # The outcomes before it are needed until the next checkpoint is there.
        if path.exists():
            aside = _free(path)
            with self._failing(aside.name):
                durable.write_whole(aside, self._read(path)[loss.position :])
                os.truncate(path, loss.position)
        self.loss = None

    def _rename_aside(self, path: Path) -> None:
        with self._failing(path.name):
            path.replace(_free(path))

    def _seal(self, what: str) -> durable.Seal | None:
        """Of a kind of record; an outcome counts in its own run only."""
        if self._key is None:
            return None
        return durable.Seal(self._key, f"{what} of {self._run_id}" if what == "outcome" else what)

    # Files.

    def _path(self, kind: str, sequence: int) -> Path:
        return self._folder / f"{kind}-{sequence:012d}"

    def _found(self, kind: str) -> list[int]:
        matches = [_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        return sorted(int(match[2]) for match in matches if match and match[1] == kind)

    def _read(self, path: Path) -> memoryview:
        try:
            return _content(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error

    def _begin_log(self, sequence: int) -> None:
        self._set_aside()
        path = self._path("log", sequence)
        with self._failing(path.name):
            handle = _opened(path, os.O_TRUNC | os.O_APPEND)
            if self._log >= 0:
                os.close(self._log)
            self._log, self._log_bytes, self._log_name = handle, 0, path.name
            if self._syncs:
                durable.sync_folder(self._folder)

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._folder.is_dir():
                raise StorageError(f"{name} cannot be written: {self._folder} is gone") from error
            raise StorageError(f"{self._folder / name} cannot be written: {why_unwritten(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(path: Path, flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | flags, durable.OWNER_ONLY)


def _write(handle: int, parts: Sequence[Section]) -> int:
    """Write all; how many bytes that was."""
    total = 0
    for part in parts:
        view = memoryview(part).cast("B") if len(part) else memoryview(b"")
        total += len(view)
        while view:
            view = view[os.write(handle, view) :]
    return total


def _content(path: Path) -> memoryview:
    with plain_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _is_torn(content: memoryview, position: int, error: DamagedError) -> bool:
    """Whether the log ends, from ``position`` on, as a write that was cut off leaves it: in a part of a
    record, or in room for one that was never written to."""
    rest = np.frombuffer(content, dtype=np.uint8, offset=position)
    if not isinstance(error, durable.CutShortError) and rest.any():
        return False
    return durable.next_record(content, position) is None


def _whole_records(content: memoryview) -> int:
    """How many whole records there are, whatever lies between them."""
    count = start = 0
    while (found := durable.next_record(content, start)) is not None:
        start = found[0] + found[1].length
        count += 1
    return count


def _free(path: Path) -> Path:
    """A name beside ``path`` for what is set aside of it."""
    names = (path.with_name(f"{path.name}{ASIDE}{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def unusable(folder: Path) -> str:
    """What to say of a run's state that is whole, and whose content no run can be resumed from."""
    return (
        f"the state in {folder} has whole records whose content cannot be used; restore the folder from a "
        "backup, or start a new run in another directory"
    )


@contextlib.contextmanager
def content_named(kind: type[AflError], what: str) -> Iterator[None]:
    """Within the block, what comes of a record's content that is not as this version writes it is an error of
    this kind: without an integrity key a checksum only says that the bytes are those that somebody wrote."""
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise kind(f"{what} ({type(error).__name__}: {error})") from error


def _checkpoint(record: Record) -> Checkpoint:
    values = dict(record.values)
    if values.pop("format") != FORMAT:
        raise durable.OtherVersionError("it was written by another version of afl")
    arrays = durable.unpacked_arrays(values.pop("arrays"), record.sections)
    run_id, sequence = values.pop("run_id"), values.pop("sequence")
    if not (isinstance(run_id, str) and type(sequence) is int):
        raise TypeError(f"the run {run_id!r} and the sequence {sequence!r}")
    return Checkpoint(run_id, sequence, values, arrays)


def _entry(record: Record) -> Entry:
    values = dict(record.values)
    described, header = values.pop("arrays"), values.pop("payload")
    arrays = durable.unpacked_arrays(described, record.sections[: len(described)])
    evaluation = values.pop("evaluation")
    payload = None
    if header is not None:
        payload = Payload(PayloadHeader.of_values(header), record.sections[len(described) :])
    outcome = Outcome(
        Step(Position(*values.pop("position")), Kind[values.pop("kind")]),
        arrays.pop("losses"),
        payload,
        arrays,
        None if evaluation is None else Evaluation.of_values(evaluation),
    )
    return Entry(values.pop("sequence"), outcome, values)
