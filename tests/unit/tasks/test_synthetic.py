from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from afl.core.randomness import SharedRandomness
from afl.errors import ConfigError
from afl.tasks import TaskContext
from afl.tasks.base import Batch, example_count, take_batch
from afl.tasks.synthetic import Synthetic

Vector = NDArray[np.float64]


def folded(values: Vector) -> np.float64:
    while len(values) > 1:
        half = len(values) // 2
        values = np.concatenate(
            [values[:half] + values[len(values) - half :], values[half : len(values) - half]]
        )
    return values[0]


def by_numpy(
    w32: NDArray[np.float32], batch: Batch, *, scale: float, noise_w: float, noise_q: float
) -> tuple[float, NDArray[np.float32]]:
    """The loss and gradient as the module's docstring gives them, without torch."""
    centres, zetas, vs = (part.numpy() for part in batch)
    w, c, dim = w32.astype(np.float64), centres[0].astype(np.float64), len(w32)
    zeta = zetas.sum(dtype=np.int64) / len(zetas)
    v = vs.sum(axis=0, dtype=np.int64) / len(zetas)
    a, b = scale / dim, noise_w / dim
    u = w - c
    p = u * u
    q = 1 + p
    x = w * w
    y = 1 + x
    loss = a * folded(p / q) + noise_q * zeta + b * folded(v * (w / y))
    gradient = a * ((u + u) / (q * q)) + b * (v * ((1 - x) / (y * y)))
    return float(loss), gradient.astype(np.float32)


def evaluate(task: Synthetic, w: NDArray[np.float32], batch: Batch) -> tuple[float, NDArray[np.float32]]:
    model = task.model()
    (parameter,) = model.parameters()
    parameter.data = torch.from_numpy(w.copy())
    loss = task.loss(model, batch)
    assert loss.dtype == torch.float64
    loss.backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float32
    return loss.item(), parameter.grad.numpy()


@pytest.mark.parametrize("dim", [1, 2, 7, 100, 1001])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_loss_and_gradient_equal_numpys_to_the_bit(dim: int, batch_size: int, context: TaskContext) -> None:
    settings = {"scale": 1.7, "noise_w": 0.3, "noise_q": 0.9}
    task = Synthetic(dim=dim, examples=64, spread=2.5, **settings)
    data = task.data(3, context)
    w = np.random.default_rng(dim).normal(size=dim).astype(np.float32)
    batch = take_batch(data.train, torch.randperm(64)[:batch_size])
    assert isinstance(batch, tuple)
    loss, gradient = evaluate(task, w, batch)
    expected_loss, expected_gradient = by_numpy(w, batch, **settings)
    assert loss == expected_loss
    assert gradient.tobytes() == expected_gradient.tobytes()


def test_gradient_agrees_with_finite_differences(context: TaskContext) -> None:
    task = Synthetic(dim=5, examples=8, noise_w=2.0)
    batch = take_batch(task.data(0, context).train, torch.tensor([0, 3, 4]))
    w = np.array([0.3, -1.2, 2.0, 0.0, 0.7], dtype=np.float32)
    _, gradient = evaluate(task, w, batch)
    for place in range(5):
        step = np.zeros(5, dtype=np.float32)
        step[place] = 2.0**-10
        rise = evaluate(task, w + step, batch)[0] - evaluate(task, w - step, batch)[0]
        assert gradient[place] == pytest.approx(rise / 2.0**-9, rel=1e-3, abs=1e-6)


def test_noise_cancels_over_the_training_set_and_over_the_test_pair(context: TaskContext) -> None:
    noisy, still = Synthetic(noise_q=3.0, noise_w=5.0), Synthetic(noise_q=0.0, noise_w=0.0)
    w = np.linspace(-2, 2, 100).astype(np.float32)
    data = noisy.data(1, context)
    whole = take_batch(data.train, torch.arange(example_count(data.train)))
    assert isinstance(data.test, tuple)
    expected_loss, expected_gradient = evaluate(still, w, whole)
    for batch in (whole, data.test):
        loss, gradient = evaluate(noisy, w, batch)
        assert loss == expected_loss
        assert (gradient == expected_gradient).all()


def test_the_bounds_hold_and_are_nearly_reached() -> None:
    context = TaskContext(workers=1, randomness=SharedRandomness.from_int(5))
    options = {"dim": 4, "examples": 32, "scale": 2.0, "spread": 0.0}
    still = Synthetic(**options, noise_q=0.0, noise_w=0.0)
    assert (still.sigma_w, still.sigma_q) == (0.0, 0.0)
    pair = still.data(0, context).test
    steepest = np.full(4, 1 / math.sqrt(3), dtype=np.float32)
    assert np.linalg.norm(evaluate(still, steepest, pair)[1]) == pytest.approx(still.lipschitz, rel=1e-6)
    near, far = np.zeros(4, dtype=np.float32), np.full(4, 1e-4, dtype=np.float32)
    slope = np.linalg.norm(evaluate(still, far, pair)[1]) / np.linalg.norm(far - near)
    assert slope == pytest.approx(still.smoothness, rel=1e-6)

    noisy = Synthetic(**options, noise_q=0.5, noise_w=1.5)
    examples = noisy.data(0, context).train
    for value in (0.0, 1.0, -0.4, 3.0):
        w = np.full(4, value, dtype=np.float32)
        mean_loss, mean_gradient = evaluate(still, w, pair)
        for row in range(32):
            loss, gradient = evaluate(noisy, w, take_batch(examples, torch.tensor([row])))
            assert abs(loss - mean_loss) <= noisy.sigma_q + 1e-12
            assert np.linalg.norm(gradient - mean_gradient) <= noisy.sigma_w + 1e-6
    at_zero = evaluate(noisy, near, take_batch(examples, torch.tensor([0])))[1]
    assert np.linalg.norm(at_zero) == pytest.approx(noisy.sigma_w, rel=1e-6)


def test_data_is_drawn_as_documented(context: TaskContext) -> None:
    task = Synthetic(dim=3, examples=4, spread=2.0)
    centre, zeta, v = task.data(2, context).train  # type: ignore[misc]
    philox = np.random.Philox(key=7, counter=[0, 7, 0, 2])
    uniforms = (philox.random_raw(3) >> np.uint64(11)) * 2.0**-53
    word = int(philox.random_raw())
    signs = [1 if word >> bit & 1 else -1 for bit in range(8)]
    assert centre.tolist() == [(2.0 * (2 * uniforms - 1)).astype(np.float32).tolist()] * 4
    assert zeta.tolist() == [signs[0], -signs[0], signs[4], -signs[4]]
    assert v[::2].tolist() == [signs[1:4], signs[5:8]]
    assert (v[1::2] == -v[::2]).all()
    assert centre.stride(0) == 0


def test_gradients_can_be_taken_for_several_workers_at_once(context: TaskContext) -> None:
    task = Synthetic(dim=6, examples=8)
    model = task.model()
    batches = [take_batch(task.data(worker, context).train, torch.tensor([0, 2, 5])) for worker in range(3)]

    def loss(w: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
        return task.loss(lambda: w, batch)  # type: ignore[arg-type]

    stacked = [torch.stack(parts) for parts in zip(*batches, strict=True)]
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(model.w.detach(), *stacked)
    for gradient, batch in zip(gradients, batches, strict=True):
        assert torch.equal(gradient, torch.from_numpy(evaluate(task, np.full(6, 0.1, np.float32), batch)[1]))


def test_an_odd_number_of_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.options\.examples: 7 is not accepted: .*multiple of 2"):
        Synthetic(examples=7)
