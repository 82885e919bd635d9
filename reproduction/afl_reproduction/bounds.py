"""Measured stationarity beside the theorems' bounds, on the `synthetic` task, whose constants are known.

python -m afl_reproduction.bounds --workers 4 16 64 256

Each run has the theorem's step sizes and block length, and compressors sized by `ratio: theory` unless
--ratio is given. What is measured is the mean over rounds of ||grad Phi_{1/(2L)}(w_t)||^2, which the theorems
bound in expectation. G^2 bounds it whatever the algorithm does.

With --centres 2 one worker differs from all others, and the objective is the same for every number of
workers: what grows with it is the method's alone. By default each worker differs, and the objective changes
with their number.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.compressors import compressor_class, create
from afl.core.messages import Kind
from afl.core.randomness import SharedRandomness
from afl.tasks import Task, TaskContext
from afl.tasks.synthetic import Synthetic
from afl.theory import block_length, dual_step, primal_step, theory_ratio
from afl_lab.simulation.driver import Driver
from afl_reproduction.theory.risks import SyntheticRisks
from afl_reproduction.theory.stationarity import delta_phi, mean_square
from afl_reproduction.theory.theorems import Constants, bound, covering

METHODS: Final[Mapping[str, str]] = {
    "afl-br": "identity",
    "afl-com top-k": "top-k",
    "afl-com rand-k": "rand-k",
}
"""Each method's compressor, both ways."""

TOLERANCE: Final = 1e-6
"""What a measured norm may be wrong by, in units of G."""


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        delta: the compressor's contraction.
        measured: the mean over rounds of the squared norm.
        measured_at_most: the same with the certified errors of the norms added.
        bound: the theorem's.
        dual_term: its term in ``sqrt(ln m)``.
        trivial: ``G^2``.
        delta_phi: certified from above.
        seconds: how long the run and its measurement took.
    """

    method: str
    workers: int
    rounds: int
    seed: int
    theorem: int
    delta: float
    measured: float
    measured_at_most: float
    bound: float
    dual_term: float
    trivial: float
    delta_phi: float
    seconds: float


def measure(
    task: Synthetic,
    method: str,
    *,
    workers: int,
    rounds: int,
    seed: int,
    batch_size: int,
    ratio: float | None,
) -> Result:
    """Run a method of :data:`METHODS` once and set what it reached beside its theorem's bound.

    Args:
        ratio: share of the coordinates that compressors keep; ``None`` for the theory's.
    """
    began = time.perf_counter()
    choice = _compressor(METHODS[method], workers, ratio)
    compressor = create(choice.name, task.options.dim, choice.options)
    settings = AlgorithmSettings(
        workers=workers,
        rounds=rounds,
        block=block_length(rounds),
        eta_w=primal_step(rounds, task.smoothness),
        eta_q=dual_step(rounds, workers, task.sigma_q),
        uplink=choice,
        downlink=choice,
        name=method.partition(" ")[0],
    )
    risks = SyntheticRisks.of(task, TaskContext(workers, SharedRandomness.from_int(seed)))
    tolerance = TOLERANCE * task.lipschitz
    models = list(trained_models(task, settings, seed=seed, batch_size=batch_size))
    assert len(models) == rounds
    found = mean_square(risks, models, tolerance)
    constants = Constants(
        task.smoothness, task.lipschitz, task.sigma_w, task.sigma_q, delta_phi(risks, models[0], tolerance)
    )
    theorem, delta = covering(
        compressor.delta, compressor.delta, downlink_loses=not compressor.additive_idempotent
    )
    proved = bound(theorem, constants, workers=workers, rounds=rounds, delta=delta)
    (dual_term,) = [term.value for term in proved.terms if term.name == "dual weights"]
    return Result(
        method=method,
        workers=workers,
        rounds=rounds,
        seed=seed,
        theorem=int(theorem),
        delta=delta,
        measured=found.value,
        measured_at_most=found.highest,
        bound=proved.value,
        dual_term=dual_term,
        trivial=proved.trivial,
        delta_phi=constants.delta_phi,
        seconds=time.perf_counter() - began,
    )


def trained_models(
    task: Task, settings: AlgorithmSettings, *, seed: int, batch_size: int
) -> Iterator[NDArray[np.float32]]:
    """The models ``w_1 .. w_T`` of a run, each ``[d]``: those at which gradients are taken."""
    driver = Driver(
        task,
        settings,
        SharedRandomness.from_int(seed),
        batch_size=batch_size,
        evaluation_batch_size=batch_size,
        evaluate_every=settings.rounds,
    )
    for step in driver.steps():
        if step.kind is Kind.TRAIN:
            yield driver.model.numpy().copy()


def _compressor(name: str, workers: int, ratio: float | None) -> CompressorChoice:
    if name == "identity":
        return CompressorChoice()
    is_ai = compressor_class(name).additive_idempotent
    kept = (
        theory_ratio("additive-idempotent" if is_ai else "contractive", workers) if ratio is None else ratio
    )
    return CompressorChoice(name, {"ratio": kept})


def compared(results: Sequence[Result]) -> Table:
    """A row for each method and number of workers: means over seeds, in units of G^2, and growth in m."""
    table = Table(
        title="Mean over rounds of the squared norm in units of G^2, and its growth from the first m",
        title_justify="left",
    )
    for heading in (
        *("method", "m", "delta", "measured", "bound", "bound / measured"),
        *("measured grows", "bound grows", "sqrt(ln m) grows"),
    ):
        is_first = heading == "method"
        table.add_column(heading, justify="left" if is_first else "right", no_wrap=is_first)
    for method in dict.fromkeys(result.method for result in results):
        rows = list(_means([result for result in results if result.method == method]))
        first = rows[0]
        for row in rows:
            table.add_row(
                method,
                f"{row['workers']:.0f}",
                f"{row['delta']:.3f}",
                f"{row['measured'] / row['trivial']:.4f}",
                f"{row['bound'] / row['trivial']:.4g}",
                f"{row['bound'] / row['measured']:.3g}",
                *(f"{row[name] / first[name]:.3f}" for name in ("measured", "bound", "dual_term")),
            )
        table.add_section()
    return table


def _means(results: Sequence[Result]) -> Iterator[dict[str, float]]:
    """Means over seeds, for each number of workers in order of appearance."""
    names = ("workers", "delta", "measured", "bound", "dual_term", "trivial")
    for workers in dict.fromkeys(result.workers for result in results):
        same = [result for result in results if result.workers == workers]
        yield {name: math.fsum(getattr(result, name) for result in same) / len(same) for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a bound does not hold."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    task = Synthetic(
        dim=options.dim,
        spread=options.spread,
        centres=options.centres,
        noise_w=options.noise_w,
        noise_q=options.noise_q,
    )
    results = []
    for method in options.methods:
        for workers in options.workers:
            for seed in range(1, options.seeds + 1):
                result = measure(
                    task,
                    method,
                    workers=workers,
                    rounds=options.rounds,
                    seed=seed,
                    batch_size=options.batch_size,
                    ratio=options.ratio,
                )
                results.append(result)
                line = json.dumps(asdict(result))
                print(line, file=sys.stderr)
                if options.output is not None:
                    with options.output.open("a", encoding="utf-8") as file:
                        file.write(line + "\n")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(compared(results))
    return int(any(result.measured_at_most > result.bound for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afl_reproduction.bounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    more: dict[str, Any] = {"nargs": "+"}
    parser.add_argument("--workers", type=int, default=[4, 16, 64, 256], metavar="M", **more)
    parser.add_argument("--methods", choices=METHODS, default=list(METHODS), **more)
    parser.add_argument("--rounds", type=int, default=144, metavar="T")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1 to this one")
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--spread", type=float, default=1.0, help="of the workers' centres")
    parser.add_argument("--centres", type=int, help="how many differ; the last is shared (default: all)")
    parser.add_argument("--noise-w", type=float, default=0.5, help="sigma_w is this over sqrt(dim)")
    parser.add_argument("--noise-q", type=float, default=0.1, help="sigma_q is this and half of noise-w")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--ratio", type=float, help="what compressors keep (default: the theory's)")
    parser.add_argument("--output", type=Path, help="append a line of JSON for each run")
    return parser


if __name__ == "__main__":
    sys.exit(main())
