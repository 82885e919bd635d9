"""Where a worker's time goes, round by round."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from afl.config.quantities import shown_seconds


@dataclass
class Spent:
    """Seconds of wall-clock time and of this thread's CPU time; ``with`` it, a block's are added."""

    wall: float = 0.0
    cpu: float = 0.0

    def __enter__(self) -> None:
        self.wall -= time.perf_counter()
        self.cpu -= time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.wall += time.perf_counter()
        self.cpu += time.thread_time()


@dataclass
class Timings:
    """Totals by phase over the process's life.

    Attributes:
        compute: losses, gradients and evaluations; the oracle counts it.
        codec: error feedback, compression, coding, the model's step, and the compute within.
        prepare: the next round's randomness, while others wait for the network.
        wait: for the server, which waits for the other workers.
    """

    compute: Spent = field(default_factory=Spent)
    codec: Spent = field(default_factory=Spent)
    prepare: Spent = field(default_factory=Spent)
    wait: Spent = field(default_factory=Spent)
    steps: int = 0
    shown: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds by phase up to the last step's end, for other threads: an open block's are not to be
    read."""

    def step_ended(self) -> None:
        """One more step is done."""
        self.steps += 1
        compute = self.compute.wall
        self.shown = {
            "compute": compute,
            "codec": self.codec.wall - compute,
            "prepare": self.prepare.wall,
            "wait": self.wait.wall,
        }

    def seconds(self) -> dict[str, float]:
        """For the log, by phase and clock."""
        phases = {"compute": self.compute, "codec": self._codec, "prepare": self.prepare, "wait": self.wait}
        return {
            f"{name}_{clock}": round(seconds, 6)
            for name, spent in phases.items()
            for clock, seconds in asdict(spent).items()
        }

    def __str__(self) -> str:
        return (
            f"{self.steps} steps: {shown_seconds(self.compute.wall)} in the task's code, "
            f"{shown_seconds(self._codec.wall)} in coding, {shown_seconds(self.wait.wall)} waiting for the "
            "server and the other workers"
        )

    @property
    def _codec(self) -> Spent:
        """Without the compute within."""
        return Spent(self.codec.wall - self.compute.wall, self.codec.cpu - self.compute.cpu)
