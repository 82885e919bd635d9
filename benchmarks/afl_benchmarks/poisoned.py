"""What one hostile worker does to the others' accuracy, without and with each means against it.

python -m afl_benchmarks.poisoned

Simulated, on the task digits; worker 0 is hostile from round 10 on, and the honest are the others. Each row
is an attack, each column what the configuration has against it; the figures are the honest workers' lowest
test accuracy at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from afl.config import config_from_mapping
from afl.core.codecs.plain import VALUE_BYTES
from afl.core.messages import CommittedStep, Kind, Payload, Report
from afl.core.participant import Participant
from afl.core.randomness import SharedRandomness
from afl.errors import DivergedError, NonFiniteError
from afl.tasks.registry import load_task
from afl_lab.simulation.driver import Driver, metered

HOSTILE, BEGINS = 0, 10
"""The worker, and the round from which on it attacks."""

WORKERS, ROUNDS = 10, 100

Attack = Callable[[Report, list[Payload]], tuple[Report, list[Payload]]]


def with_loss(loss: float) -> Attack:
    """Report another loss."""
    return lambda report, payloads: (replace(report, loss=loss), payloads)


def with_noise(scale: float) -> Attack:
    """Send noise in place of the update, float32."""

    def attack(report: Report, payloads: list[Payload]) -> tuple[Report, list[Payload]]:
        header = payloads[0].header
        random = np.random.default_rng(report.position.round)
        values = random.standard_normal(header.total_bytes // VALUE_BYTES).astype("<f4") * np.float32(scale)
        return report, [Payload(header, (values.view(np.uint8).data,)), *payloads[1:]]

    return attack


ATTACKS: Mapping[str, Attack | None] = {
    "none": None,
    "loss 1e300": with_loss(1e300),
    "loss -1e300": with_loss(-1e300),
    "loss 1000": with_loss(1e3),
    "noise x 1000": with_noise(1e3),
    "noise x 1e20": with_noise(1e20),
}

MEANS: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    "largest_weight: 0.2": {"algorithm": {"largest_weight": 0.2}},
    "loss_cap: 10": {"faults": {"loss_cap": 10.0}},
    "update_norm": {"faults": {"update_norm": {"times": 10}}},
    "all three": {
        "algorithm": {"largest_weight": 0.2},
        "faults": {"loss_cap": 10.0, "update_norm": {"times": 10}},
    },
}


class _Lying:
    """Answers steps as ``participant`` does, but for the hostile worker's training reports."""

    def __init__(self, participant: Participant, attack: Attack) -> None:
        self._participant = participant
        self._attack = attack
        self.forget = participant.forget

    def take(self, step: CommittedStep) -> Iterator[tuple[Kind, tuple[Report, list[Payload]]]]:
        """The workers' answers, one after the other."""
        for kind, (report, payloads) in self._participant.take(step):
            if report.worker == HOSTILE and kind is Kind.TRAIN and report.position.round >= BEGINS:
                yield kind, self._attack(report, payloads)
            else:
                yield kind, (report, payloads)


def poisoned(config: Mapping[str, Any], attack: Attack | None) -> Driver:
    """A simulated run in which the hostile worker attacks."""
    whole = config_from_mapping(config)
    assert whole.run.seed is not None
    task = load_task(whole.task.name, whole.task.options)
    driver, _ = metered(whole, task, SharedRandomness.from_int(whole.run.seed))
    if attack is not None:
        driver._participant = _Lying(driver._participant, attack)  # type: ignore[assignment]  # noqa: SLF001
    return driver


def honest_accuracy(driver: Driver) -> float:
    """The honest workers' lowest accuracy at the end; NaN where the run did not get there."""
    try:
        for _ in driver.steps():
            pass
    except (DivergedError, NonFiniteError):
        return float("nan")
    evaluation = driver.engine.last_evaluation
    assert evaluation is not None
    return min(
        (entry.get("accuracy", float("nan")) for entry in evaluation.metrics[HOSTILE + 1 :]),
        key=lambda accuracy: (accuracy == accuracy, accuracy),  # noqa: PLR0124  # NaN first
    )


def config_of(means: Mapping[str, Any]) -> dict[str, Any]:
    """The run, with some means."""
    return {
        "workers": WORKERS,
        "task": {"name": "digits", "batch_size": 32, "options": {"hidden": [64]}},
        "algorithm": {
            "name": "afl-com",
            "rounds": ROUNDS,
            "eta_w": 0.3,
            "eta_q": 0.1,
            "uplink": {"name": "rand-k", "ratio": 0.5},
            **means.get("algorithm", {}),
        },
        "evaluation": {"every": ROUNDS},
        "run": {"seed": 7},
        "faults": means.get("faults", {}),
    }


def main() -> None:
    """The table, as Markdown."""
    torch.set_num_threads(1)
    print(f"| attack | {' | '.join(MEANS)} |")
    print("|---" * (len(MEANS) + 1) + "|")
    for name, attack in ATTACKS.items():
        figures = [honest_accuracy(poisoned(config_of(means), attack)) for means in MEANS.values()]
        shown = ["the run ends" if figure != figure else f"{figure:.3f}" for figure in figures]  # noqa: PLR0124
        print(f"| {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
