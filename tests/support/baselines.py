"""SGDA, DRFA and FedAvg on the ``synthetic`` task in plain numpy, from the papers alone.

As in :mod:`support.reference`, nothing of ``afl`` is imported. Models and means are float64 here, so the
comparison with a federation is to a relative 1e-6, not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from support.reference import (
    MINIBATCH,
    RANDOM_OUTPUT,
    Doubles,
    Stepper,
    _data,
    _divided,
    _integer,
    _oracle,
    _words,
    subset,
)

SNAPSHOT, MODEL_SAMPLING, LOSS_SAMPLING, LOSS_MINIBATCH = 3, 9, 10, 11

OPTIONS = {"dim": 100, "examples": 256, "scale": 1.0, "spread": 1.0, "noise_w": 0.5, "noise_q": 0.1}


def run(config: Mapping[str, Any], *, seed: int = 7) -> tuple[list[Doubles], list[Doubles]]:
    """The model and the dual weights before the first and after each synchronization."""
    algorithm, workers = config["algorithm"], config["workers"]
    options = {**OPTIONS, **config["task"].get("options", {})}
    data = [_data(seed, worker, options) for worker in range(workers)]
    size, rounds, tau = config["task"]["batch_size"], algorithm["rounds"], algorithm.get("local_steps", 1)
    eta_w, eta_q = algorithm["eta_w"], algorithm.get("eta_q", 0.0)
    sampled, stepper, decay = (
        algorithm.get("sampled"),
        Stepper(algorithm, 0),
        algorithm.get("weight_decay", 0.0),
    )

    def oracle(w: Doubles, i: int, t: int, purpose: int = MINIBATCH) -> tuple[float, Doubles]:
        centre, zeta, v = data[i]
        trained, held_out = _divided(seed, i, len(zeta), config["task"])
        is_held_out = purpose == LOSS_MINIBATCH and algorithm.get("dual_loss") == "held-out"
        part = held_out if is_held_out else trained
        batch = part[subset(_words(seed, purpose, t, i), len(part), min(size, len(part)))]
        loss, gradient = _oracle(w.astype(np.float32), centre, zeta[batch], v[batch], options)
        return loss, gradient.astype(np.float64)

    def local(w: Doubles, i: int, updates: range) -> list[Doubles]:
        """The models after 1, 2, ... local steps."""
        models = []
        for t in updates:
            eta = eta_w * stepper.factor(t)
            w = w * (1 - eta * decay) - eta * oracle(w, i, t)[1]
            models.append(w)
        return models

    w = np.full(int(options["dim"]), np.float64(np.float32(0.1)))
    q = np.full(workers, 1.0 / workers)
    models, weights = [w], [q]
    for s in range(1, -(-rounds // tau) + 1):
        updates = range((s - 1) * tau + 1, min(s * tau, rounds) + 1)
        if algorithm["name"] == "sgda":
            answers = [oracle(w, i, s) for i in range(workers)]
            if algorithm.get("dual_loss") == "held-out":
                losses = [oracle(w, i, s, LOSS_MINIBATCH)[0] for i in range(workers)]
            else:
                losses = [loss for loss, _ in answers]
            w = w - eta_w * stepper.factor(s) * sum(
                q[i] * gradient for i, (_, gradient) in enumerate(answers)
            )
            q = project(q + eta_q * stepper.factor_of_eta_q(s) * np.array(losses))
        elif algorithm["name"] == "fedavg":
            counts = [len(zeta) if algorithm.get("weighting") == "samples" else 1 for _, zeta, _ in data]
            ends = [local(w, i, updates)[-1] for i in range(workers)]
            w = sum(n * end for n, end in zip(counts, ends, strict=True)) / sum(counts)
        else:
            share = q
            if sampled:
                share = np.zeros(workers)
                for _, word in zip(range(sampled), _words(seed, MODEL_SAMPLING, s), strict=False):
                    share[np.searchsorted(np.cumsum(q), (word >> 11) * 2.0**-53, side="right")] += 1 / sampled
            at = _integer(_words(seed, SNAPSHOT, s), len(updates))
            paths = [local(w, i, updates) for i in range(workers)]
            w = sum(share[i] * paths[i][-1] for i in range(workers))
            snapshot = sum(share[i] * paths[i][at] for i in range(workers))
            losses = np.zeros(workers)
            asked = subset(_words(seed, LOSS_SAMPLING, s), workers, sampled) if sampled else range(workers)
            for i in asked:
                losses[i] = oracle(snapshot, i, s, LOSS_MINIBATCH)[0] * (workers / sampled if sampled else 1)
            q = project(q + len(updates) * eta_q * stepper.factor_of_eta_q(updates[-1]) * losses)
        models.append(w)
        weights.append(q)
    return models, weights


def random_round(seed: int, synchronizations: int) -> int:
    """The synchronization whose beginning is the random output."""
    return _integer(_words(seed, RANDOM_OUTPUT), synchronizations) + 1


def project(point: Doubles) -> Doubles:
    """The nearest point of the simplex: bisection on theta in ``sum max(x - theta, 0) = 1``."""
    low, high = point.min() - 1, point.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - low, 0)
