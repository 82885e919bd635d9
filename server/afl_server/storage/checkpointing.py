"""A run's outcomes and checkpoints: written while it goes, put back when it is resumed. Calls block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afl.core.algorithms.base import Arrays
from afl.core.model.parameters import ParameterVector
from afl.core.rounds.engine import RoundEngine
from afl.core.rounds.results import Outcome
from afl.daemon.fault_points import reached
from afl.errors import ConfigError
from afl_server.federation.counters import Moment
from afl_server.federation.effects import ENGINE_PREFIX
from afl_server.storage.descriptor_retry import retry_without_descriptor
from afl_server.storage.records import RunRecords
from afl_server.storage.store import Checkpoint, Entry, RunStore


class Checkpointing:
    """Between a federation and the store of its run. What cannot be written or read is a ``StorageError``.

    Its methods are called one at a time, but for :meth:`publish`, which may take its time on a thread of its
    own.

    Args:
        every: a checkpoint is due after so many synchronization rounds, or when the log is long.
    """

    def __init__(self, store: RunStore, records: RunRecords, vector: ParameterVector, every: int) -> None:
        self._store = store
        self._records = records
        self._vector = vector
        self._every = every
        self._sequence = 0
        self._checkpoint_round = 0
        self._is_begun = False

    def append(self, outcome: Outcome, moment: Moment, round_: int) -> bool:
        """Make the outcome of the step that was closed last durable; whether a checkpoint is due."""
        reached("server.before-log")
        self._store.append(Entry(self._sequence, outcome, moment.values()))
        reached("server.after-log")
        self._sequence += 1
        return round_ - self._checkpoint_round >= self._every or self._store.is_due

    def write(self, values: Mapping[str, Any], arrays: Arrays, round_: int) -> Path:
        """Write a checkpoint, for :meth:`publish`.

        Args:
            round_: the synchronization round that is open.
        """
        if not self._is_begun and self._vector.frozen_length:
            retry_without_descriptor(self._store.keep_frozen, self._vector.frozen_bytes())
        self._is_begun = True
        self._checkpoint_round = round_
        checkpoint = Checkpoint(self._records.run_id, self._sequence, values, arrays)
        return retry_without_descriptor(self._store.write, checkpoint)

    def publish(self, temporary: Path) -> None:
        """Make a written checkpoint count, once it and the metrics so far are on the disk."""
        self._records.sync()
        retry_without_descriptor(self._store.publish, temporary)

    def restore(self, checkpoint: Checkpoint, engine: RoundEngine) -> Moment:
        """Put model and engine back to a checkpoint; when it was made.

        Raises:
            ConfigError: if the task's model is not the run's any more.
        """
        arrays, vector = checkpoint.arrays, self._vector
        if checkpoint.values["layout"] != vector.layout_hash().hex():
            raise ConfigError(
                f"task: the model of {self._records.config.task.name} has another layout than the run in "
                f"{self._records.directory}; use the version of the task that the run began with"
            )
        found = checkpoint.values.get("frozen", "")
        if found != vector.frozen_digest:
            raise ConfigError(
                f"task: the frozen parameters are not those that the run in {self._records.directory} began "
                f"with: their digest is {vector.frozen_digest or 'none'}, the run's {found or 'none'}; give "
                "the task the file that it had then"
            )
        vector.initial_digest = checkpoint.values.get("initial_model", "")
        vector.load(arrays["params"])
        if vector.frozen_length:
            vector.load_frozen(self._store.frozen())
        if vector.buffers.size:
            vector.buffers.load(arrays["buffers"])
        own = {name: array for name, array in arrays.items() if name.startswith(ENGINE_PREFIX)}
        own = {name.removeprefix(ENGINE_PREFIX): array for name, array in own.items()}
        engine.restore(checkpoint.values["engine"], own)
        self._sequence = checkpoint.sequence
        self._records.round, self._records.last_evaluation = engine.last_round, engine.last_evaluation
        return Moment.of_values(checkpoint.values["moment"])

    def replayed(self, entry: Entry) -> None:
        """An outcome of the log has been replayed."""
        self._sequence = entry.sequence + 1
