"""The synthetic task's exact risks against its loss, and their lower bound against a grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from afl.core.randomness import SharedRandomness
from afl.tasks import TaskContext
from afl.tasks.synthetic import Synthetic
from afl_reproduction.theory.risks import SyntheticRisks


@pytest.mark.parametrize("dim", [1, 7, 100])
def test_they_are_the_means_over_each_worker_s_examples(dim: int, context: TaskContext) -> None:
    task = Synthetic(dim=dim, scale=1.7, spread=2.5, noise_w=0.4, noise_q=0.8)
    risks = SyntheticRisks.of(task, context)
    w = np.linspace(-2, 2, dim).astype(np.float32)
    values, gradients = risks.values(w.astype(np.float64)), risks.gradients(w.astype(np.float64))
    assert values.shape == (context.workers,)
    assert gradients.shape == (context.workers, dim)
    for worker in range(context.workers):
        model = task.model()
        (parameter,) = model.parameters()
        parameter.data = torch.from_numpy(w.copy())
        loss = task.loss(model, task.data(worker, context).train)
        loss.backward()  # type: ignore[no-untyped-call]
        assert values[worker] == pytest.approx(loss.item(), rel=1e-14)
        assert gradients[worker] == pytest.approx(parameter.grad.double().numpy(), rel=1e-6, abs=1e-9)
    assert risks.smoothness == task.smoothness


def test_workers_may_share_the_last_centre(context: TaskContext) -> None:
    """Then the worst risk is the same for any number of workers, and each still has noise of its own."""
    own, shared = Synthetic(dim=5, examples=64), Synthetic(dim=5, examples=64, centres=3)
    w = np.full(5, 0.4)
    values = SyntheticRisks.of(shared, context).values(w)
    assert values[:3].tolist() == SyntheticRisks.of(own, context).values(w)[:3].tolist()
    assert values[3:].tolist() == [values[2]] * 7
    for worker in range(context.workers):
        (centre, *noise), (_, *expected) = (task.data(worker, context).train for task in (shared, own))
        assert torch.equal(
            centre[0].double(), torch.from_numpy(SyntheticRisks.of(shared, context).centres[worker])
        )
        assert all(torch.equal(one, other) for one, other in zip(noise, expected, strict=True))


@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_nothing_is_below_the_lower_bound(workers: int, spread: float) -> None:
    risks = SyntheticRisks.of(
        Synthetic(dim=2, spread=spread), TaskContext(workers, SharedRandomness.from_int(3))
    )
    axis = np.linspace(-spread, spread, 201)
    lowest = min(risks.values(np.array([x, y])).max() for x in axis for y in axis)
    generator = np.random.default_rng(workers)
    for weights in (*np.eye(workers), *generator.dirichlet(np.ones(workers), 20)):
        for resolution in (4, 512):
            assert risks.lower_bound(weights, resolution) <= lowest


def test_the_lower_bound_is_nearly_reached() -> None:
    # Two centres at +-a of one coordinate: rho(x - a) + rho(x + a) is least at 0 for small a, where both are
    # rho(a), and equal weights make that the bound.
    risks = SyntheticRisks(np.array([[0.25], [-0.25]]), scale=2.0)
    least = 2.0 * 0.0625 / 1.0625
    assert risks.lower_bound(np.array([0.5, 0.5])) == pytest.approx(least, abs=2.0 * (0.5 / 512) ** 2 / 3)
    assert risks.values(np.zeros(1)) == pytest.approx([least, least], rel=1e-15)
