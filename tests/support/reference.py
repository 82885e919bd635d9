"""AFL-Com on the ``synthetic`` task in plain numpy, from the paper and the published formulas alone.

Nothing of ``afl`` is imported: this is the other opinion that a federation is compared with. One process,
no sockets, whole vectors, loops where loops are clearest.

Algorithm 2 (AFL-Com), for t = 1, ..., T::

    worker i:   p = e_i + q_{t,i} g_i ;  c_i = C_t(p) ;  e_i <- p - c_i
    server:     s = e_hat + sum_i c_i ;  D = C_t(s)   ;  e_hat <- s - D
                q_{t+1} = uniform if t mod B == 0, else proportional to q_{t,i} exp(eta_q l_i);
                          with a largest weight, the nearest to that (KL) of all below it;
                          or as another rule has it (:func:`_other_rule`)
    everyone:   w <- w - eta_w D, or the step of an optimizer along D (:class:`Stepper`)

With a schedule, eta_w is the round's, and a residual is first multiplied by ``eta_w(t-1) / eta_w(t)``, but
with Adam. A gradient longer than ``clip_norm`` is scaled down to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

COMPRESSOR, RANDOM_OUTPUT, MINIBATCH, SYNTHETIC_DATA, DOWNLINK_COMPRESSOR = 1, 2, 4, 7, 12
LOSS_MINIBATCH, HELD_OUT_SPLIT = 11, 17


@dataclass
class Reference:
    """A whole run.

    Attributes:
        weights: w_1, ..., w_{T+1}: ``weights[t]`` is the model after t updates.
        dual_weights: q_1, ..., q_{T+1}: ``dual_weights[t - 1]`` is what round t used.
        losses: l_{t,i}: ``losses[t - 1]`` is what the workers reported in round t.
    """

    weights: list[Floats] = field(default_factory=list)
    dual_weights: list[Doubles] = field(default_factory=list)
    losses: list[Doubles] = field(default_factory=list)
    test_losses: dict[int, Doubles] = field(default_factory=dict)
    held_out_losses: dict[int, Doubles] = field(default_factory=dict)
    random_round: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], *, seed: int = 7, stop_after: int | None = None) -> Reference:
        """Run what a configuration describes, or its first ``stop_after`` rounds."""
        task, algorithm = config["task"], config["algorithm"]
        options: dict[str, Any] = {
            "dim": 100,
            "examples": 256,
            "scale": 1.0,
            "spread": 1.0,
            "noise_w": 0.5,
            "noise_q": 0.1,
        }
        options |= task.get("options", {})
        workers, rounds, dim = config["workers"], algorithm["rounds"], int(options["dim"])
        block = algorithm.get("block", math.ceil(math.sqrt(rounds)))
        uplink = algorithm.get("uplink", {"name": "identity"})
        downlink = algorithm.get("downlink", uplink)
        every = config.get("evaluation", {}).get("every", 50)
        data = [_data(seed, worker, options) for worker in range(workers)]

        run = cls(random_round=_integer(_words(seed, RANDOM_OUTPUT), rounds) + 1)
        w = np.full(dim, 0.1, dtype=np.float32)
        q = np.full(workers, 1.0 / workers)
        residuals = [np.zeros(dim, dtype=np.float32) for _ in range(workers)]
        server_residual = np.zeros(dim, dtype=np.float32)
        shared_by = workers if config.get("privacy", {}).get("secure_aggregation") else 1
        grid = IntegerGrid(uplink["bits"], shared_by) if "bits" in uplink else None
        stepper = Stepper(algorithm, dim)
        mean, counted = np.zeros(dim, dtype=np.float32), 0
        dual = algorithm.get("dual", {"name": "kl-restarts"})
        largest = algorithm.get("largest_weight")
        if dual["name"] == "cvar":
            largest = 1 / max(1.0, dual["share"] * workers)
        averages = np.zeros(workers)
        run.weights.append(w)
        run.dual_weights.append(q)
        for t in range(1, (stop_after or rounds) + 1):
            total = np.zeros(dim, dtype=np.float32)
            losses = np.zeros(workers)
            for i, (centre, zeta, v) in enumerate(data):
                trained, held_out = _divided(seed, i, len(zeta), task)
                batch = trained[subset(_words(seed, MINIBATCH, t, i), len(trained), task["batch_size"])]
                losses[i], gradient = _oracle(w, centre, zeta[batch], v[batch], options)
                if algorithm.get("dual_loss") == "held-out":
                    size = min(task["batch_size"], len(held_out))
                    batch = held_out[subset(_words(seed, LOSS_MINIBATCH, t, i), len(held_out), size)]
                    losses[i] = _oracle(w, centre, zeta[batch], v[batch], options)[0]
                length = math.sqrt(math.fsum(float(g) ** 2 for g in gradient))
                shrunk = min(1.0, algorithm.get("clip_norm", math.inf) / length)
                p = stepper.rescaled(residuals[i], t) + np.float32(q[i] * shrunk) * gradient
                c = _compressed(uplink, p, seed, t) if grid is None else grid.message(uplink, p, seed, t)
                residuals[i] = p - c
                total = total + c
            if grid is None:
                s = stepper.rescaled(server_residual, t) + total
                update = _compressed(
                    downlink, s, seed, t, COMPRESSOR if downlink == uplink else DOWNLINK_COMPRESSOR
                )
                server_residual = s - update
            else:
                update = grid.close(uplink, dim, seed, t)
            w = stepper.step(t, w, update)
            if algorithm.get("final_model") == "block-mean" and t > rounds - block:
                counted += 1
                mean = mean + np.float32(1 / counted) * (w - mean)
                w = mean if t == rounds else w
            eta_q = algorithm.get("eta_q", 0.0) * stepper.factor_of_eta_q(t)
            if dual["name"] not in {"kl-restarts", "cvar"}:
                kept = dual.get("beta", 0.9) if t > 1 else 0.0
                averages = kept * averages + (1 - kept) * losses
                q = _other_rule(dual, q, losses, averages, eta_q)
            elif t % block == 0:
                q = np.full(workers, 1.0 / workers)
            else:
                q = q * np.exp(eta_q * (losses - losses.max()))
                q = q / q.sum()
                if largest is not None:
                    q = _capped(q, largest)
            run.weights.append(w)
            run.dual_weights.append(q)
            run.losses.append(losses)
            if t % every == 0 or t == rounds:
                run.test_losses[t] = np.array([_risk(w, centre, options) for centre, _, _ in data])
                if task.get("held_out"):
                    run.held_out_losses[t] = np.array(
                        [
                            _oracle(w, centre, zeta[held_out], v[held_out], options)[0]
                            for i, (centre, zeta, v) in enumerate(data)
                            for _, held_out in (_divided(seed, i, len(zeta), task),)
                        ]
                    )
        return run

    @property
    def best_round(self) -> int:
        """The evaluated round whose highest test loss is lowest; the first of equals."""
        return min(self.test_losses, key=lambda round_: float(self.test_losses[round_].max()))


class Stepper:
    """The step of every copy of the model along D."""

    def __init__(self, algorithm: Mapping[str, Any], dim: int) -> None:
        self.algorithm = algorithm
        self.schedule: Mapping[str, Any] = algorithm.get("schedule", {})
        self.optimizer = {"name": "sgd", "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
        self.optimizer |= algorithm.get("optimizer", {})
        self.first = self.second = np.zeros(dim, dtype=np.float32)

    def factor(self, t: int) -> float:
        """What eta_w is multiplied by in round t."""
        warm_up, then = self.schedule.get("warm_up", 0), self.schedule.get("then", "constant")
        if t <= warm_up:
            return t / warm_up
        if then == "cosine":
            final = self.schedule.get("final", 0.0)
            done = (t - 1 - warm_up) / (self.algorithm["rounds"] - warm_up)
            return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
        if then == "steps":
            return float(self.schedule.get("factor", 0.1) ** sum(t > at for at in self.schedule["at"]))
        return 1.0

    def factor_of_eta_q(self, t: int) -> float:
        return self.factor(t) if self.schedule.get("eta_q") else 1.0

    def rescaled(self, residual: Floats, t: int) -> Floats:
        """A residual of round t - 1 in the units of round t."""
        if t == 1 or self.optimizer["name"] == "adam" or self.factor(t - 1) == self.factor(t):
            return residual
        return np.float32(self.factor(t - 1) / self.factor(t)) * residual

    def step(self, t: int, w: Floats, update: Floats) -> Floats:
        eta, one = self.algorithm["eta_w"] * self.factor(t), np.float32
        if "weight_decay" in self.algorithm:
            w = w * one(1 - eta * self.algorithm["weight_decay"])
        b1, b2 = self.optimizer["beta_1"], self.optimizer["beta_2"]
        if self.optimizer["name"] == "sgd":
            return w - one(eta) * update
        if self.optimizer["name"] == "momentum":
            self.first = one(b1) * self.first + update
            return w - one(eta) * self.first
        self.first = one(b1) * self.first + one(1 - b1) * update
        self.second = one(b2) * self.second + one(1 - b2) * (update * update)
        root = math.sqrt(1 - b2**t)
        quotient = self.first / (np.sqrt(self.second) + one(self.optimizer["epsilon"] * root))
        return w - one(eta * root / (1 - b1**t)) * quotient


def _other_rule(
    dual: Mapping[str, Any], q: Doubles, losses: Doubles, averages: Doubles, eta_q: float
) -> Doubles:
    """The next dual weights by a rule without restarts."""
    if dual["name"] == "kl-regularized":
        raised = np.exp((averages - averages.max()) / dual["temperature"])
        return np.asarray(raised / raised.sum())
    if dual["name"] == "fixed-share":
        raised = q * np.exp(eta_q * (losses - losses.max()))
        return np.asarray((1 - dual["uniform"]) * raised / raised.sum() + dual["uniform"] / len(q))
    assert dual["name"] == "projected"
    point = q + eta_q * losses
    descending = np.sort(point)[::-1]
    excess = (np.cumsum(descending) - 1) / np.arange(1, len(q) + 1)
    return np.maximum(point - excess[np.flatnonzero(descending > excess)[-1]], 0.0)


def _capped(q: Doubles, largest: float) -> Doubles:
    """Cap what is above, scale what is not to sum to the rest, until nothing is above."""
    full: set[int] = set()
    while True:
        rest = [i for i in range(len(q)) if i not in full]
        scale = (1 - largest * len(full)) / sum(q[i] for i in rest)
        capped = np.array([largest if i in full else q[i] * scale for i in range(len(q))])
        over = {i for i in rest if capped[i] > largest * (1 + 1e-12)}
        if not over:
            return capped
        full |= over


def _divided(
    seed: int, worker: int, examples: int, task: Mapping[str, Any]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of a worker's examples give gradients, and which are held out, both ascending."""
    size = round(task.get("held_out", 0) * examples)
    held_out = subset(_words(seed, HELD_OUT_SPLIT, 0, worker), examples, size)
    return np.setdiff1d(np.arange(examples), held_out), held_out


# The task, as documented in common/afl/tasks/synthetic.py.


def _data(
    seed: int, worker: int, options: Mapping[str, Any]
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    dim, pairs = options["dim"], options["examples"] // 2
    generator = _philox(seed, SYNTHETIC_DATA, 0, worker)
    uniform = (generator.random_raw(dim) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    centre = (options["spread"] * (2 * uniform - 1)).astype(np.float32)
    words = generator.random_raw(-(-pairs * (dim + 1) // 64))
    places = np.arange(64, dtype=np.uint64)
    bits = ((words[:, None] >> places) & np.uint64(1)).reshape(-1)[: pairs * (dim + 1)]
    signs = (2 * bits.astype(np.int64) - 1).reshape(pairs, dim + 1)
    both = np.stack([signs, -signs], axis=1).reshape(2 * pairs, dim + 1)
    return centre, both[:, 0], both[:, 1:]


def _oracle(
    w32: Floats, centre: Floats, zetas: NDArray[np.int64], vs: NDArray[np.int64], options: Mapping[str, Any]
) -> tuple[float, Floats]:
    a, b = options["scale"] / options["dim"], options["noise_w"] / options["dim"]
    zeta, v = zetas.sum() / len(zetas), vs.sum(axis=0) / len(zetas)
    w = w32.astype(np.float64)
    u = w - centre.astype(np.float64)
    p = u * u
    q = 1 + p
    x = w * w
    y = 1 + x
    loss = a * _fold(p / q) + options["noise_q"] * zeta + b * _fold(v * (w / y))
    gradient = a * ((u + u) / (q * q)) + b * (v * ((1 - x) / (y * y)))
    return float(loss), gradient.astype(np.float32)


def _risk(w: Floats, centre: Floats, options: Mapping[str, Any]) -> float:
    u = w.astype(np.float64) - centre.astype(np.float64)
    return float(options["scale"] / options["dim"] * _fold(u * u / (1 + u * u)))


def _fold(values: Doubles) -> np.float64:
    while len(values) > 1:
        half = len(values) // 2
        folded = values[:half] + values[len(values) - half :]
        values = np.concatenate([folded, values[half : len(values) - half]])
    result: np.float64 = values[0]
    return result


# Compressors.


class IntegerGrid:
    """Integers on one grid, for a model of one tensor."""

    def __init__(self, bits: int, shared_by: int = 1) -> None:
        self.limit = (2 ** (bits - 1) - 1) // shared_by
        self.far = 2.5 * self.limit if self.limit < 15 else self.limit
        self.range = 0.05 if self.limit < 15 else 1.6
        self.sums: list[int] | None = None
        self.is_far = False

    @property
    def step(self) -> float:
        step = 2.0**-60
        while self.limit * step < self.range:
            step *= 2
        return step

    def message(self, compressor: Mapping[str, Any], p: Floats, seed: int, t: int) -> Floats:
        """What a worker's integers stand for; they are added to the sum."""
        analysis = _analysis(compressor, len(p), seed, t)
        values = (analysis @ p.astype(np.float64)).astype(np.float32)
        nearest = [round(float(value) / self.step) for value in values]
        sent = [max(-self.limit, min(self.limit, i)) for i in nearest]
        self.is_far |= any(abs(i) > self.far for i in nearest)
        self.sums = [a + b for a, b in zip(self.sums or [0] * len(sent), sent, strict=True)]
        return (analysis.T @ (np.array(sent) * self.step)).astype(np.float32)

    def close(self, compressor: Mapping[str, Any], dim: int, seed: int, t: int) -> Floats:
        """D_t, after which the range is the next round's."""
        assert self.sums is not None
        update = _analysis(compressor, dim, seed, t).T @ (np.array(self.sums) * self.step)
        self.range *= 2.0 if self.is_far else 0.95 if any(self.sums) else 0.5
        self.sums, self.is_far = None, False
        return update.astype(np.float32)


def _analysis(compressor: Mapping[str, Any], dim: int, seed: int, t: int) -> Doubles:
    """The matrix that takes a vector to the values that travel, ``[k, dim]``; its rows are orthonormal."""
    if compressor["name"] in {"identity", "rand-k"}:
        return np.eye(dim)[_support(compressor, np.zeros(dim, np.float32), seed, t)]
    k = max(1, round(compressor["ratio"] * dim))
    if compressor["name"] == "dct-projection":
        return _sampled_dct(_words(seed, COMPRESSOR, t), dim, k)
    return _random_rows(_philox(seed, COMPRESSOR, t), dim, k)


def _random_rows(generator: np.random.Philox, dim: int, rank: int) -> Doubles:
    """The first rows of a product of Householder reflections, whose directions are normal numbers by the
    ratio of uniforms."""
    needed = dim * rank - rank * (rank - 1) // 2
    numbers: list[float] = []
    while len(numbers) < needed:
        for _ in range(int(1.4 * (needed - len(numbers))) + 16):
            u, v = (int(generator.random_raw()) >> 11 for _ in range(2))
            x = math.sqrt(8 / math.e) * (v * 2.0**-53 - 0.5) / (1 - u * 2.0**-53)
            if x * x <= -4 * math.log(1 - u * 2.0**-53):
                numbers.append(x)
    product = np.eye(dim)
    for j in range(rank):
        x = np.array(numbers[: dim - j])
        del numbers[: dim - j]
        sign = math.copysign(1.0, x[0])
        v = x + sign * math.sqrt(x @ x) * np.eye(dim - j)[0]
        reflection = np.eye(dim)
        reflection[j:, j:] -= 2 * np.outer(v, v) / (v @ v)
        # Further reflections leave the axes before theirs as they are.
        product = product @ reflection
        product[:, j] *= -sign
    return product[:, :rank].T


def _compressed(
    compressor: Mapping[str, Any], p: Floats, seed: int, t: int, purpose: int = COMPRESSOR
) -> Floats:
    """C_t(p)."""
    if compressor["name"] == "scaled-sign":
        scale = np.float32(math.fsum(abs(float(x)) for x in p) / len(p))
        return np.sign(p) * scale
    if compressor["name"] == "dct-projection":
        q = _sampled_dct(_words(seed, purpose, t), len(p), max(1, round(compressor["ratio"] * len(p))))
        coefficients = (q @ p.astype(np.float64)).astype(np.float32)
        return (q.T @ coefficients.astype(np.float64)).astype(np.float32)
    support = _support(compressor, p, seed, t, purpose)
    kept = np.zeros_like(p)
    kept[support] = p[support]
    return kept


def _sampled_dct(words: Iterator[int], dim: int, size: int) -> Doubles:
    """Some rows of the orthonormal DCT-II, columns negated where a bit of the first words is set."""
    flipped = [word >> bit & 1 for word in islice(words, -(-dim // 64)) for bit in range(64)][:dim]
    rows = subset(words, dim, size)[:, None]
    matrix = np.sqrt(2 / dim) * np.cos(np.pi * rows * (2 * np.arange(dim) + 1) / (2 * dim))
    matrix[rows[:, 0] == 0] /= np.sqrt(2)
    signed: Doubles = matrix * (1 - 2 * np.array(flipped))
    return signed


def _support(
    compressor: Mapping[str, Any], p: Floats, seed: int, t: int, purpose: int = COMPRESSOR
) -> NDArray[np.int64]:
    dim = len(p)
    if compressor["name"] == "identity":
        return np.arange(dim)
    k = max(1, round(compressor["ratio"] * dim))
    if compressor["name"] == "rand-k":
        return subset(_words(seed, purpose, t), dim, k)
    assert compressor["name"] == "top-k"
    by_magnitude = np.lexsort((np.arange(dim), -np.abs(p)))
    return np.sort(by_magnitude[:k])


# Shared randomness: Philox4x64-10, key = seed, counter = (0, purpose, round, worker).


def _philox(seed: int, purpose: int, round_: int = 0, worker: int = 0) -> np.random.Philox:
    key = np.array([seed % 2**64, seed >> 64], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, purpose, round_, worker], dtype=np.uint64))


def _words(seed: int, purpose: int, round_: int = 0, worker: int = 0) -> Iterator[int]:
    generator = _philox(seed, purpose, round_, worker)
    while True:
        yield int(generator.random_raw())


def _integer(words: Iterator[int], bound: int) -> int:
    bits = (bound - 1).bit_length()
    return next(value for value in (word >> (64 - bits) for word in words) if value < bound)


def subset(words: Iterator[int], population: int, size: int) -> NDArray[np.int64]:
    """The first ``size`` distinct values of Lemire's sequence; above one half, the complement's."""
    if 2 * size > population:
        left_out = subset(words, population, population - size)
        return np.setdiff1d(np.arange(population), left_out)
    chosen: set[int] = set()
    for word in words:
        for half in (word & 0xFFFFFFFF, word >> 32):
            product = half * population
            if product & 0xFFFFFFFF >= (1 << 32) % population and len(chosen) < size:
                chosen.add(product >> 32)
        if len(chosen) == size:
            break
    return np.array(sorted(chosen), dtype=np.int64)


def final_values(directory: Path, dim: int = 100) -> bytes:
    """The values of a run's final model, float32 of so many parameters, which are the end of its file."""
    return (directory / "model-final.safetensors").read_bytes()[-4 * dim :]
