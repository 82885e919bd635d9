"""Record-level privacy: what it costs in accuracy, and in time and memory.

    python -m afl_benchmarks.record_privacy accuracy [--seeds 3] [--rounds 150]
    python -m afl_benchmarks.record_privacy steps

``accuracy`` simulates Fashion-MNIST (``AFL_DATA`` names its folder) at 10 workers with label skew, without
privacy and at epsilon 8 and 3, with whole vectors and with a tenth of the values, and prints a table: the
worst worker's and the mean test accuracy at the last evaluations, over the seeds. ``steps`` times a worker's
gradient of 64 examples with and without privacy, in CPU time of one thread, and measures what it needs in
memory, each in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from afl import Classification, SharedRandomness, TaskContext, WorkerData
from afl.config import config_from_mapping
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.record_privacy import RecordPrivacy
from afl.runs.files import METRICS_FILE, metrics_entries, of_event
from afl.tasks.data.models import femnist_cnn, mlp
from afl.tasks.initialization import build_vector
from afl_lab.simulation.run import simulate
from afl_worker.training.oracle import TaskOracle
from afl_worker.training.private import make_oracle

WORKERS, BATCH, DELTA = 10, 512, 1e-5

STEPS = {None: (0.3, 0.1), 8.0: (1.0, 0.1), 3.0: (0.5, 0.1)}
"""eta_w and eta_q by epsilon: the best of some that were tried with the first seed."""

UPLINKS: dict[str, dict[str, Any]] = {
    "whole vectors": {"name": "identity"},
    "rand-k 10 %": {"name": "rand-k", "ratio": 0.1},
}

LAST = 5
"""Evaluations that are averaged."""

TIMED, SLICES = 5, 6
"""Steps of a slice, and slices after the first, which is left out."""


def configuration(
    epsilon: float | None, uplink: dict[str, Any], seed: int, rounds: int, steps: tuple[float, float]
) -> dict[str, Any]:
    """Of one run."""
    records = {"epsilon": epsilon, "delta": DELTA, "clip": 1.0, "loss_clip": 5.0}
    private = {"privacy": {"records": records}, "worker": {"journal": "machine"}}
    return {
        "workers": WORKERS,
        "task": {"name": "fashion-mnist", "batch_size": BATCH, "options": {"hidden": [64]}},
        "algorithm": {
            "name": "afl-com",
            "rounds": rounds,
            "eta_w": steps[0],
            "eta_q": steps[1],
            "uplink": uplink,
        },
        "evaluation": {"every": max(1, rounds // 15)},
        "run": {"seed": seed},
        **({} if epsilon is None else private),
    }


def accuracies(config: dict[str, Any]) -> tuple[float, float]:
    """The worst worker's test accuracy and the workers' mean, over the last evaluations of a run."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        simulate(config_from_mapping(config), directory, saves_models=False)
        lines = of_event(metrics_entries(directory / METRICS_FILE)[0], "evaluation")[-LAST:]
    worst, mean = (
        statistics.mean(line[name] for line in lines) for name in ("worst_accuracy", "mean_accuracy")
    )
    return worst, mean


def measure_accuracy(seeds: int, rounds: int, steps: tuple[float, float] | None, only: str | None) -> None:
    """Print a line of the table after the other."""
    print("| epsilon | messages | worst worker | mean | seeds |\n|---|---|---|---|---|", flush=True)
    for epsilon, own in STEPS.items():
        for name, uplink in UPLINKS.items():
            if only is not None and only != f"{epsilon} {name.split()[0]}":
                continue
            found = [
                accuracies(configuration(epsilon, uplink, seed, rounds, steps or own))
                for seed in range(seeds)
            ]
            shown = [
                f"{statistics.mean(each):.3f} ({min(each):.3f} to {max(each):.3f})"
                for each in zip(*found, strict=True)
            ]
            print(f"| {epsilon or 'none'} | {name} | {shown[0]} | {shown[1]} | {seeds} |", flush=True)


class Low(nn.Module):
    """A linear layer that stays as it is, and an adapter of rank 4 (LoRA)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Block(nn.Module):
    """Attention and a perceptron with adapters, 4 heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = Low(width, 3 * width), Low(width, width)
        self.mlp = nn.Sequential(Low(width, 4 * width), nn.GELU(), Low(4 * width, width))
        self.norms.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, length, width]`` to the same."""
        n, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(n, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(n, length, width)
        x = x + self.out(mixed)
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Transformer(nn.Module):
    """Two blocks of width 128 over 32 of 1000 tokens, of which adapters and head are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        self.tokens.requires_grad_(requires_grad=False)
        self.blocks, self.head = nn.Sequential(Block(128), Block(128)), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of token sequences, int64 ``[n, 32]``."""
        out: Tensor = self.head(self.blocks(self.tokens(x)).mean(1))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "MLP 784-256-128-10": (lambda: mlp(784, (256, 128), 10), lambda: torch.rand(512, 1, 28, 28)),
    "LEAF's CNN, hidden layer of 2048": (femnist_cnn, lambda: torch.rand(512, 1, 28, 28)),
    "transformer with LoRA": (Transformer, lambda: torch.randint(0, 1000, (512, 32))),
}


class Random(Classification):
    """Random examples for a model of :data:`MODELS`."""

    def __init__(self, name: str) -> None:
        self.make, self.draw = MODELS[name]

    def model(self) -> nn.Module:
        """It."""
        return self.make()

    def data(self, worker: int, context: TaskContext) -> WorkerData:  # noqa: ARG002
        """512 examples."""
        x, y = self.draw(), torch.randint(0, 10, (512,))
        return WorkerData(train=(x, y), test=(x[:8], y[:8]))


def oracle_of(name: str, *, private: bool) -> tuple[TaskOracle, int]:
    """For one worker, and d."""
    torch.set_num_threads(1)
    task, randomness = Random(name), SharedRandomness.from_int(1)
    settings = AlgorithmSettings(
        workers=1,
        rounds=100,
        block=1,
        eta_w=0.1,
        eta_q=0.1,
        records=RecordPrivacy(1.0, 5.0, 1e-5, noise=1.0) if private else None,
    )
    vector = build_vector(task, randomness)
    data = {0: task.data(0, TaskContext(1, randomness))}
    oracle = make_oracle(
        task, vector, data, randomness, settings, batched=False, batch_size=64, evaluation_batch_size=8
    )
    return oracle, vector.dim


def seconds_of(name: str) -> tuple[float, float]:
    """The medians of a gradient's CPU seconds without and with privacy, in slices that alternate: what else
    the machine does slows both alike."""
    oracles = [oracle_of(name, private=is_private)[0] for is_private in (False, True)]
    seconds: list[list[float]] = [[], []]
    for slice_ in range(SLICES + 1):
        for oracle, own in zip(oracles, seconds, strict=True):
            for step in range(TIMED):
                started = time.thread_time()
                oracle.weighted_gradient(0, slice_ * TIMED + step + 1, 1.0)
                if slice_:
                    own.append(time.thread_time() - started)
    plain, private = map(statistics.median, seconds)
    return plain, private


def memory_of(name: str, *, private: bool) -> tuple[int, float]:
    """d, and by how many MB gradients raise the process's peak memory."""
    oracle, dim = oracle_of(name, private=private)
    # The imports of the first call are not the gradients'.
    torch.func.vmap(torch.func.grad(torch.sin))(torch.zeros(2))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_ in range(TIMED):
        oracle.weighted_gradient(0, round_ + 1, 1.0)
    return dim, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def measure_steps() -> None:
    """Print the table."""
    print("| model | d | plain | private | times | memory plain | private |\n|---|---|---|---|---|---|---|")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in MODELS:
            plain, private = pool.apply(seconds_of, (name,))
            (dim, less), (_, more) = (
                pool.apply(memory_of, (name,), {"private": is_private}) for is_private in (False, True)
            )
            print(
                f"| {name} | {dim:,} | {1000 * plain:.3g} ms | {1000 * private:.3g} ms | "
                f"{private / plain:.1f} | {less:.0f} MB | {more:.0f} MB |",
                flush=True,
            )


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["accuracy", "steps"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--step-sizes", type=float, nargs=2, metavar=("ETA_W", "ETA_Q"))
    parser.add_argument("--only", metavar="RUN", help='such as "8.0 whole"')
    options = parser.parse_args()
    if options.what == "steps":
        measure_steps()
    else:
        given = tuple(options.step_sizes) if options.step_sizes else None
        measure_accuracy(options.seeds, options.rounds, given, options.only)


if __name__ == "__main__":
    main()
