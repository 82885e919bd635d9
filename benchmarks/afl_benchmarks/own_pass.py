"""What a worker itself does with a gradient and with a step, beside the copy of as many bytes; on one core.

python -m afl_benchmarks.own_pass --dim 10000000

A *report* weighs the gradient, adds it to the residual, checks that all is finite, takes the message out
and packs it. A *step* moves the model by a message. Each is compared with a ``memcpy`` that moves as many
bytes as must be read and written: the gradient once, the residual both ways, the message, and the cache
lines of the model that move, both ways.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from afl.core.algorithms.base import LocalSteps, LocalUpdate
from afl.core.algorithms.local_sgd import step_by_step
from afl.core.algorithms.registry import worker_side
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.messages import Position
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.vectors import Weighted

CASES = {
    "identity": CompressorChoice("identity"),
    "rand-k 10 %": CompressorChoice("rand-k", {"ratio": 0.1}),
    "top-k 1 %": CompressorChoice("top-k", {"ratio": 0.01}),
}
A_LINE = 16
"""Float32 values in a cache line of 64 bytes."""

LAYERS = 20
"""The gradient lies in so many parts."""


class _Model:
    """A fixed gradient, as autograd leaves it."""

    train_examples = 1

    def __init__(self, params: Tensor, gradient: Tensor) -> None:
        self.params = params
        self._parts = torch.tensor_split(gradient, LAYERS)

    def publish(self) -> None:
        """Nothing computes with it."""

    def local_steps(self, steps: LocalSteps) -> LocalUpdate:
        """One after the other."""
        return step_by_step(self, steps)

    def loss(self, synchronization: int) -> tuple[float, int]:  # noqa: ARG002
        """Always the same."""
        return 1.0, 1

    def gradient(self, update: int, scale: float) -> tuple[float, int, Tensor]:
        """As a vector."""
        loss, examples, weighted = self.weighted_gradient(update, scale)
        whole = torch.empty_like(self.params)
        weighted.write(whole)
        return loss, examples, whole

    def weighted_gradient(self, update: int, scale: float) -> tuple[float, int, Weighted]:  # noqa: ARG002
        """In parts."""
        return 1.0, 1, Weighted(self._parts, [len(part) for part in self._parts], scale)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dim = options.dim
    randomness = SharedRandomness.from_int(1)
    gradient = torch.from_numpy(
        (randomness.stream(Purpose.SYNTHETIC_DATA).uniform(dim) - 0.5).astype(np.float32)
    )
    print(f"dim {dim}; one core; medians of {options.repeats}\n")
    print(f"{'':14}{'report, ms':>12}{'memcpy':>9}{'ratio':>7}{'step, ms':>12}{'memcpy':>9}{'ratio':>7}")
    for name, choice in CASES.items():
        report, step, copy = measure(choice, gradient, randomness, options.repeats)
        share = float(choice.options.get("ratio", 1.0))
        residual = 0 if choice.name == "identity" else 2
        lines = 1.0 - (1.0 - share) ** A_LINE
        row = f"{name:14}"
        for milliseconds, vectors in ((report, 1 + residual + share), (step, share + 2 * lines)):
            # A copy reads and writes.
            floor = copy * vectors / 2
            row += f"{milliseconds:12.2f}{floor:9.2f}{milliseconds / floor:7.2f}"
        print(row)


def measure(
    choice: CompressorChoice, gradient: Tensor, randomness: SharedRandomness, repeats: int
) -> tuple[float, float, float]:
    """Milliseconds of a report, of a step, and of copying the gradient, measured in turn."""
    settings = AlgorithmSettings(1, repeats + 1, 1, 0.01, 0.1, choice, choice)
    side = worker_side(settings, len(gradient), randomness, [0])
    model = _Model(torch.zeros_like(gradient), gradient)
    copied = np.zeros(len(gradient), dtype=np.float32)
    seconds: list[tuple[float, ...]] = []
    for round_ in range(1, repeats + 1):
        side.prepare(round_)
        report, (_, (payload,)) = _timed(
            partial(side.halves[0].train, Position(round_, 0), weight=0.3, model=model)
        )
        data, after = memoryview(b"".join(payload.sections)), Position(round_ + 1, 0)
        step, _ = _timed(partial(side.replica.apply, after, model.params, payload.header, data))
        copy, _ = _timed(partial(np.copyto, copied, gradient.numpy()))
        seconds.append((report, step, copy))
    report, step, copy = (1e3 * statistics.median(column) for column in zip(*seconds, strict=True))
    return report, step, copy


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
