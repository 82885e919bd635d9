"""Small sites: dual weights that follow training losses, and such that follow held-out ones.

    python -m afl_benchmarks.small_sites [--seeds 5] [--rounds 1200]

The hospitals of docs/examples/hospitals, where the one that is unlike the others has 100 to 10,000 records,
in simulation. It prints, as means over the seeds, the area under the ROC curve on test records, and the mean
dual weight of the small site, as a table for docs/decisions.md. About six minutes of one core.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from afl import Classification, TaskContext, WorkerData
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.messages import Kind
from afl.core.randomness import SharedRandomness
from afl_lab.simulation.driver import Driver

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "hospitals"

MODES = {
    "nothing held out": (0.0, False),
    "held out, training losses": (0.2, False),
    "held out, held-out losses": (0.2, True),
}

PROBLEMS = (("network", 32, 100), ("network", 32, 300), ("network", 32, 1000), ("network", 32, 10_000))
LINEAR = (("logistic", 0, 300),)

EVERY = 50
"""Rounds between two evaluations."""


class Hospitals(Classification):
    """The example's, with so many records at site 0; ``hidden`` 0 is logistic regression."""

    def __init__(self, seed: int, records: int, hidden: int) -> None:
        self.seed, self.records, self.hidden = seed, records, hidden
        self.auc = runpy.run_path(str(EXAMPLE / "task.py"))["auc"]

    def model(self) -> nn.Module:
        """One hidden layer, or none."""
        if not self.hidden:
            return nn.Linear(20, 2)
        return nn.Sequential(nn.Linear(20, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 2))

    def data(self, worker: int, context: TaskContext) -> WorkerData:  # noqa: ARG002
        """As the example's task has it."""
        made = runpy.run_path(str(EXAMPLE / "make_data.py"))
        x, y = map(torch.from_numpy, made["hospital"](worker, self.seed, None if worker else self.records))
        later = made["LATER"]
        return WorkerData(train=(x[:-later], y[:-later]), test=(x[-later:], y[-later:]))

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss and AUC, of all records at once."""
        logits = model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        return {"loss": loss, "auc": self.auc(logits[:, 1] - logits[:, 0], batch[1])}


class Found(NamedTuple):
    """One run.

    Attributes:
        last: AUC on test records by site, at the end.
        best: the same where the worst held-out loss was lowest; and at which ``round`` that was.
        weight: site 0's mean dual weight in the second half.
    """

    last: list[float]
    best: list[float]
    weight: float
    round: int


def one_run(
    task: Hospitals, held_out: float, *, follows: bool, seed: int, rounds: int, eta_q: float
) -> Found:
    """AFL-BR; compression is not what is looked at."""
    settings = AlgorithmSettings(
        workers=3,
        rounds=rounds,
        block=int(np.ceil(np.sqrt(rounds))),
        eta_w=0.2,
        eta_q=eta_q,
        name="afl-br",
        held_out=held_out,
        dual_loss_held_out=follows,
    )
    driver = Driver(
        task,
        settings,
        SharedRandomness.from_int(seed),
        batch_size=32,
        evaluation_batch_size=1 << 20,
        evaluate_every=EVERY,
        batched=True,
    )
    evaluations: list[tuple[dict[str, float], ...]] = []
    weights = []
    for closed in driver.steps():
        if closed.kind is Kind.EVALUATE:
            assert driver.engine.last_evaluation is not None
            evaluations.append(driver.engine.last_evaluation.metrics)
        elif closed.position.round > rounds // 2 and driver.engine.last_round is not None:
            weights.append(float(driver.engine.last_round.dual_weights[0]))
    aucs = [[site["auc"] for site in sites] for sites in evaluations]
    best = len(evaluations) - 1
    if held_out:
        worst = [max(site["held_out_loss"] for site in sites) for sites in evaluations]
        best = int(np.argmin(worst))
    return Found(aucs[-1], aucs[best], float(np.mean(weights)), EVERY * (best + 1))


def measured(seeds: int, rounds: int, eta_q: float) -> Iterator[str]:
    """The table's lines."""
    best = "at the best held-out round | that round"
    yield f"| model | site 0's records | | its weight | AUC at the end, sites 0, 1, 2 | {best} |"
    yield "|---|---|---|---|---|---|---|"
    for kind, hidden, records in (*PROBLEMS, *LINEAR):
        for mode, (held_out, follows) in MODES.items():
            found = [
                one_run(
                    Hospitals(seed, records, hidden),
                    held_out,
                    follows=follows,
                    seed=seed,
                    rounds=rounds,
                    eta_q=eta_q,
                )
                for seed in range(1, seeds + 1)
            ]
            best = shown([run.best for run in found]) if held_out else "unknown"
            round_ = f"{np.mean([run.round for run in found]):.0f}" if held_out else ""
            yield (
                f"| {kind} | {records:,} | {mode} | {np.mean([run.weight for run in found]):.2f} "
                f"| {shown([run.last for run in found])} | {best} | {round_} |"
            )


def shown(aucs: list[list[float]]) -> str:
    """By site, the mean over the seeds; of site 0 also the standard error."""
    values: Any = np.array(aucs)
    error = values[:, 0].std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    first, *others = (f"{mean:.3f}" for mean in values.mean(axis=0))
    return f"{first} ± {error:.3f}, {', '.join(others)}"


def main() -> None:
    """Print the table as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1200)
    parser.add_argument("--eta-q", type=float, default=0.2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in measured(options.seeds, options.rounds, options.eta_q):
        print(line, flush=True)


if __name__ == "__main__":
    main()
