"""Writes a run's state down while it goes, and puts it back: between the coordinator and its store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afl.config import dump_config
from afl.core.algorithms.base import Arrays
from afl.core.engine import Opening, Outcome
from afl.daemon import events
from afl.daemon.fault_points import reached
from afl.errors import ConfigError
from afl_server.federation.counters import Counters
from afl_server.storage.descriptor_retry import retry_without_descriptor
from afl_server.storage.store import Checkpoint, Entry, RunStore

if TYPE_CHECKING:
    from afl_server.coordinator import Coordinator

LOG = logging.getLogger("afl.server")

_ENGINE = "engine."


@dataclass(frozen=True)
class Moment:
    """When a step was closed.

    Attributes:
        round_seconds: since the round before.
        seconds: since the run began, without the time between its processes.
        counters: as they were.
    """

    round_seconds: float
    seconds: float
    counters: Counters

    def values(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "round_seconds": self.round_seconds,
            "seconds": self.seconds,
            "tallies": self.counters.values(),
        }

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Moment:
        """From :meth:`values`."""
        return cls(values["round_seconds"], values["seconds"], Counters.of_values(values["tallies"]))


class Keeper:
    """One run's.

    Outcomes are appended on a thread of their own, which a checkpoint's way to the disk does not hold up.
    Whoever calls holds the run's turn.

    Args:
        disk: one thread, on which the run's models are written too: a checkpoint is there only once the
            models that were chosen before it are.
    """

    def __init__(self, run: Coordinator, store: RunStore, disk: ThreadPoolExecutor) -> None:
        self._run = run
        self._store = store
        self._sequence = 0
        self._checkpoint_round = 0
        self._log = ThreadPoolExecutor(1, thread_name_prefix="afl-log")
        self._disk = disk
        self._publishing: asyncio.Future[None] | None = None

    async def append(self, moment: Moment) -> None:
        """Make the outcome of the step that was closed last durable.

        Raises:
            StorageError: if it cannot be written.
        """
        outcome = self._run.engine.last_outcome
        assert outcome is not None
        reached("server.before-log")
        await self._on(self._log, self._append, outcome, moment)
        reached("server.after-log")
        self._sequence += 1

    def _append(self, outcome: Outcome, moment: Moment) -> None:
        self._store.append(Entry(self._sequence, outcome, moment.values()))

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint should be made; not while the disk is busy with the one before."""
        if self._publishing is not None and not self._publishing.done():
            return False
        rounds = self._run.engine.step.position.round - self._checkpoint_round
        return rounds >= self._run.config.server.checkpoint_every or self._store.is_due

    async def begin(self) -> None:
        """Make what this process begins with durable.

        Raises:
            StorageError: if it cannot be written.
        """
        if self._run.vector.frozen_length:
            await self._on(
                self._disk, retry_without_descriptor, self._store.keep_frozen, self._run.vector.frozen_bytes()
            )
        await self.checkpoint(waits=True)

    async def checkpoint(self, *, waits: bool = False) -> None:
        """Write down everything that the open step begins with.

        Args:
            waits: until it is on the disk; otherwise that happens while the run goes on.

        Raises:
            StorageError: if it cannot be written.
        """
        run = self._run
        await run.settle_in_turn()
        self._checkpoint_round = run.engine.step.position.round
        if self._publishing is not None:
            await self._publishing
        temporary = await self._on(self._log, retry_without_descriptor, self._store.write, self._checkpoint())
        # One job: whoever waits for the thread's end waits for all of it.
        self._publishing = asyncio.get_running_loop().run_in_executor(self._disk, self._publish, temporary)
        if waits:
            await self._publishing
        else:
            self._publishing.add_done_callback(_noted)

    def _publish(self, temporary: Path) -> None:
        self._run.records.sync()
        retry_without_descriptor(self._store.publish, temporary)

    def _checkpoint(self) -> Checkpoint:
        run = self._run
        values, arrays = run.engine.state()
        vector = run.vector
        everything: dict[str, Any] = {
            "params": vector.numpy(),
            "buffers": vector.buffers.values(),
            **{_ENGINE + name: array for name, array in arrays.items()},
        }
        return Checkpoint(
            run.run_id,
            self._sequence,
            {
                "config": dump_config(run.config),
                "layout": vector.layout_hash().hex(),
                "engine": values,
                "metrics_bytes": run.records.metrics_bytes,
                "moment": Moment(0.0, run.seconds, run.counters).values(),
            },
            everything,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put the run back to a checkpoint.

        Raises:
            ConfigError: if the task's model is not the run's any more.
        """
        run, arrays = self._run, checkpoint.arrays
        if checkpoint.values["layout"] != run.vector.layout_hash().hex():
            raise ConfigError(
                f"task: the model of {run.config.task.name} has another layout than the run in "
                f"{run.records.directory}; go on with the version of the task that the run was begun with"
            )
        run.vector.load(arrays["params"])
        if run.vector.frozen_length:
            run.vector.load_frozen(self._store.frozen())
        if run.vector.buffers.size:
            run.vector.buffers.load(arrays["buffers"])
        own: Arrays = {
            name[len(_ENGINE) :]: array for name, array in arrays.items() if name.startswith(_ENGINE)
        }
        run.engine.restore(checkpoint.values["engine"], own)
        self._sequence = checkpoint.sequence
        self._stand_at(Moment.of_values(checkpoint.values["moment"]))

    def replay(self, entry: Entry) -> Opening | None:
        """Close the open step with its outcome."""
        opening = self._run.engine.replay(entry.outcome)
        self._sequence = entry.sequence + 1
        self._stand_at(Moment.of_values(entry.values))
        return opening

    def shutdown(self) -> None:
        """Wait for what is being appended."""
        self._log.shutdown()

    def _stand_at(self, moment: Moment) -> None:
        self._run.seconds_before, self._run.counters = moment.seconds, moment.counters

    @staticmethod
    async def _on(executor: ThreadPoolExecutor, call: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(executor, call, *arguments)


def _noted(publishing: asyncio.Future[None]) -> None:
    """A checkpoint that failed is no loss while the log goes on; its error comes again where it matters."""
    error = None if publishing.cancelled() else publishing.exception()
    if error is not None:
        LOG.error("%s", error, extra=events.CheckpointFailed().extra)
