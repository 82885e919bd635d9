"""Schedules, optimizers, clipping, and the units of residuals: against formulas, and PyTorch's optimizers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from afl.core.algorithms.afl_com import AflComWorker, afl_com_side
from afl.core.algorithms.optimizers import create_optimizer, power
from afl.core.algorithms.registry import server_half
from afl.core.algorithms.schedule import Schedule
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice, OptimizerChoice
from afl.core.codecs.payload import unpack
from afl.core.compressors import Compressed, create
from afl.core.messages import Position
from afl.core.randomness import Purpose, SharedRandomness
from afl.core.vectors import BLOCK, Weighted
from afl.errors import ProtocolError

DIM, ROUNDS = 50, 40
COSINE = Schedule(warm_up=4, then="cosine", final=0.1)
SETTINGS = AlgorithmSettings(2, ROUNDS, 10, 0.3, 0.1)
RANDOMNESS = SharedRandomness.from_int(1)


def factors(schedule: Schedule, rounds: int = ROUNDS) -> list[float]:
    return [schedule.of_round(round_, rounds) for round_ in range(1, rounds + 1)]


def test_a_schedule_rises_in_the_warm_up_and_then_falls_as_it_says() -> None:
    assert factors(Schedule()) == [1.0] * ROUNDS
    assert factors(Schedule(warm_up=4))[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    steps = factors(Schedule(then="steps", at=(10, 30), factor=0.5))
    assert steps == [1.0] * 10 + [0.5] * 20 + [0.25] * 10
    cosine = factors(COSINE)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * (t - 5) / 36)) / 2 for t in range(5, ROUNDS + 1)]
    np.testing.assert_allclose(cosine[4:], expected, rtol=1e-14)
    assert cosine[4] == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("rounds", [1, 2, 100, 2**31 - 1])
def test_no_factor_of_a_cosine_is_zero(rounds: int) -> None:
    assert Schedule(then="cosine").of_round(rounds, rounds) > 0.0


def test_a_residual_s_factors_undo_those_of_the_step() -> None:
    settings = dataclasses.replace(SETTINGS, schedule=COSINE)
    for made, round_ in ((1, 2), (4, 5), (20, 37)):
        factor = settings.residual_factor(made, round_)
        assert factor * settings.eta_w_of(round_) == pytest.approx(settings.eta_w_of(made), rel=1e-14)
    assert settings.residual_factor(0, 1) == 1.0
    adam = dataclasses.replace(settings, optimizer=OptimizerChoice("adam"))
    assert {SETTINGS.residual_factor(3, 9), adam.residual_factor(3, 9)} == {1.0}


def test_powers_are_those_of_the_library_but_for_rounding() -> None:
    for exponent in (0, 1, 7, 1000, 10**9):
        assert power(0.999, exponent) == pytest.approx(0.999**exponent, rel=1e-12)


class Sent:
    """A worker's model whose gradients are drawn."""

    train_examples = 1

    def __init__(self) -> None:
        self.params = torch.zeros(DIM)
        self.drawn: dict[int, Tensor] = {}

    def weighted_gradient(self, update: int, scale: float) -> tuple[float, int, Weighted]:
        gradient = torch.from_numpy(np.random.default_rng(update).normal(size=DIM).astype(np.float32))
        self.drawn[update] = gradient * np.float32(scale)
        return 1.0, 1, Weighted([gradient], [DIM], scale)


def worker_of(settings: AlgorithmSettings) -> AflComWorker:
    half = afl_com_side(settings, DIM, RANDOMNESS, [0], "cpu", resends=True).halves[0]
    assert isinstance(half, AflComWorker)
    return half


def test_a_worker_s_residual_is_in_the_units_of_its_last_round() -> None:
    """Also after rounds without it, after a report that came too late, and in a new process."""
    top_k = CompressorChoice("top-k", {"ratio": 0.2})
    settings = dataclasses.replace(SETTINGS, uplink=top_k, downlink=top_k, schedule=COSINE)
    half, model = worker_of(settings), Sent()
    residual, before = np.zeros(DIM, dtype=np.float32), 0
    for round_ in (1, 2, 7, 8, 20):
        report, (payload,) = half.train(Position(round_, 0), 0.5, model)  # type: ignore[arg-type]
        factor = np.float32(settings.residual_factor(before, round_))
        total = factor * residual + model.drawn[round_].numpy()
        message = unpack(payload.header, payload.data)
        assert message.indices is not None
        np.testing.assert_array_equal(message.values, total[message.indices])
        residual, before = total.copy(), round_
        if round_ == 7:
            # It came too late: all of p goes with the next.
            half.put_back(report, [payload])
        else:
            residual[message.indices] = 0.0
        assert half.residual is not None
        np.testing.assert_array_equal(half.residual.numpy(), residual)
        state = {name: np.atleast_1d(array).copy() for name, array in half.state().items()}
        half = worker_of(settings)
        half.restore(state)


def run_of(settings: AlgorithmSettings, dim: int = DIM) -> tuple[list[Tensor], list[Tensor]]:
    """A model that an optimizer moves along drawn updates, after each round, and these."""
    params = torch.linspace(-1, 1, dim)
    optimizer = create_optimizer(settings, dim)
    realization = create("identity", dim, {}).realize(RANDOMNESS.stream(Purpose.COMPRESSOR, 1))
    updates = [
        torch.from_numpy(np.random.default_rng(t).normal(size=dim).astype(np.float32)) for t in range(ROUNDS)
    ]
    models = []
    for t, update in enumerate(updates, start=1):
        kept = update.clone()
        optimizer.step(t, params, realization, Compressed(update.numpy()))
        assert torch.equal(update, kept), "D is also what is sent to others"
        models.append(params.clone())
    return models, updates


@pytest.mark.parametrize("dim", [DIM, BLOCK + 3])
@pytest.mark.parametrize(
    ("choice", "decay", "theirs"),
    [
        (OptimizerChoice(), 0.1, lambda p: torch.optim.SGD(p, lr=0.3)),
        (OptimizerChoice("momentum", 0.8), 0.0, lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
        (
            OptimizerChoice("adam", 0.8, 0.95, 1e-3),
            0.1,
            lambda p: torch.optim.AdamW(p, lr=0.3, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_a_step_is_that_of_pytorch_s_optimizer_but_for_rounding(
    choice: OptimizerChoice, decay: float, theirs: Any, dim: int
) -> None:
    found, updates = run_of(dataclasses.replace(SETTINGS, optimizer=choice, weight_decay=decay), dim)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, dim, dtype=torch.float64))
    optimizer = theirs([parameter])
    for update in updates:
        if choice.name == "sgd":
            parameter.data *= 1 - 0.3 * decay
        parameter.grad = update.to(torch.float64)
        optimizer.step()
    torch.testing.assert_close(found[-1].double(), parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "slots"), [("sgd", 0), ("momentum", 1), ("adam", 2)])
def test_an_optimizer_s_state_travels_and_is_kept(name: str, slots: int) -> None:
    settings = dataclasses.replace(SETTINGS, optimizer=OptimizerChoice(name))
    one, other = (create_optimizer(settings, DIM) for _ in range(2))
    assert one.nbytes == len(one.content()) == 4 * DIM * slots
    one.state += torch.arange(DIM)
    other.load(one.content())
    assert torch.equal(one.state, other.state)
    server = server_half(settings, torch.zeros(DIM), RANDOMNESS)
    assert ("optimizer" in server.state()) is bool(slots)
    assert len(server.companions) == min(slots, 1)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("dim", [DIM, BLOCK + 3])
@pytest.mark.parametrize("last", [1, 7, ROUNDS, 10 * ROUNDS])
def test_the_final_model_is_the_mean_of_the_last(last: int, dim: int, name: str) -> None:
    settings = dataclasses.replace(SETTINGS, optimizer=OptimizerChoice(name), mean_of_last=last)
    plain = dataclasses.replace(settings, mean_of_last=0)
    found, _ = run_of(settings, dim)
    models, _ = run_of(plain, dim)
    # Until the last round, the model is as it would be without.
    assert all(map(torch.equal, found[:-1], models[:-1]))
    mean = torch.stack(models[-last:]).double().mean(dim=0)
    torch.testing.assert_close(found[-1].double(), mean, rtol=1e-5, atol=1e-6)


def test_the_mean_goes_on_from_a_state() -> None:
    settings = dataclasses.replace(SETTINGS, optimizer=OptimizerChoice("momentum"), mean_of_last=20)
    one, other = (create_optimizer(settings, DIM) for _ in range(2))
    assert one.nbytes == 2 * 4 * DIM
    params, again = torch.zeros(DIM), torch.zeros(DIM)
    realization = create("identity", DIM, {}).realize(RANDOMNESS.stream(Purpose.COMPRESSOR, 1))
    for t in range(1, ROUNDS + 1):
        update = np.random.default_rng(t).normal(size=DIM).astype(np.float32)
        one.step(t, params, realization, Compressed(update.copy()))
        if t == 30:
            other.load(one.content())
            again.copy_(params)
        elif t > 30:
            other.step(t, again, realization, Compressed(update.copy()))
    assert torch.equal(params, again)


def test_a_state_that_is_not_finite_is_refused() -> None:
    optimizer = create_optimizer(dataclasses.replace(SETTINGS, optimizer=OptimizerChoice("momentum")), DIM)
    content = np.full(DIM, np.nan, dtype="<f4").tobytes()
    with pytest.raises(ProtocolError, match="optimizer's state with a value that is not finite"):
        optimizer.load(content)


def clipped(
    parts: list[Tensor | None], sizes: list[int], factor: float, largest: float
) -> tuple[Tensor, bool]:
    weighted, out = Weighted(parts, sizes, factor), torch.empty(sum(sizes))
    weighted.clip(largest)
    return out, weighted.write(out)


def test_a_gradient_is_scaled_down_to_the_largest_norm_and_then_weighed() -> None:
    gradient = [torch.full((3, 3), 2.0), None, torch.full((7,), 2.0, dtype=torch.float64)]
    long, finite = clipped(gradient, [9, 2, 7], 0.5, 1.0)
    assert finite
    eighths, zeros = torch.full((9,), 0.125), torch.zeros(2)
    assert torch.equal(long, torch.cat([eighths, zeros, eighths[:7]]))
    short, _ = clipped(gradient, [9, 2, 7], 0.5, 8.0)
    assert short.max() == 1.0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_clipping_hides_nothing_that_is_not_finite(value: float) -> None:
    _, finite = clipped([torch.tensor([1.0, value])], [2], 0.5, 1.0)
    assert not finite
