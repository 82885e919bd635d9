"""Where a worker's time goes, round by round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from afl.participant import Oracle


@dataclass
class Spent:
    """Seconds of wall-clock time and of this thread's CPU time."""

    wall: float = 0.0
    cpu: float = 0.0


@dataclass
class Timings:
    """Totals by phase over the process's life.

    Attributes:
        compute: losses, gradients and evaluations.
        codec: error feedback, compression, coding, the model's step, and the compute within.
        prepare: the next round's randomness, while others wait for the network.
        wait: for the server, which waits for the other workers.
    """

    compute: Spent = field(default_factory=Spent)
    codec: Spent = field(default_factory=Spent)
    prepare: Spent = field(default_factory=Spent)
    wait: Spent = field(default_factory=Spent)
    steps: int = 0

    @contextmanager
    def measure(self, spent: Spent) -> Iterator[None]:
        """Add what the block takes."""
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            spent.wall += time.perf_counter() - wall
            spent.cpu += time.thread_time() - cpu

    def as_dict(self) -> dict[str, float]:
        """For the log; seconds."""
        codec = Spent(self.codec.wall - self.compute.wall, self.codec.cpu - self.compute.cpu)
        phases = {"compute": self.compute, "codec": codec, "prepare": self.prepare, "wait": self.wait}
        line: dict[str, float] = {"steps": self.steps}
        for name, spent in phases.items():
            line[f"{name}_wall"] = round(spent.wall, 6)
            line[f"{name}_cpu"] = round(spent.cpu, 6)
        return line


class TimedOracle:
    """An oracle whose time counts as compute, not as codec."""

    def __init__(self, oracle: Oracle, timings: Timings) -> None:
        self._oracle = oracle
        self._timings = timings

    def gradient(self, worker: int, round_: int) -> tuple[float, int, Tensor]:
        """As the oracle's."""
        with self._timings.measure(self._timings.compute):
            return self._oracle.gradient(worker, round_)

    def evaluate(self, worker: int) -> tuple[dict[str, float], int]:
        """As the oracle's."""
        with self._timings.measure(self._timings.compute):
            return self._oracle.evaluate(worker)
