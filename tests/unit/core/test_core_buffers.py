"""The buffers of a module that several workers compute with, and their values as a vector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from afl.core.model.buffers import BufferPolicy, ModuleBuffers
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.errors import NonFiniteError, TaskError
from afl.tasks.base import TaskContext
from afl_worker.training.batched import BatchedOracle
from afl_worker.training.oracle import TaskOracle
from support.tests_tasks import LocalNorm


class Counter(nn.Module):
    """Buffers that change in every way: in place, by another tensor, and from nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("added", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros((), dtype=torch.float64))
        self.register_buffer("late", None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("tied", self.added)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def see(self, value: float) -> None:
        self.added += value  # type: ignore[misc]
        self.replaced = self.replaced + value  # type: ignore[has-type]
        self.late = torch.full((1,), value) if self.late is None else self.late + value  # type: ignore[has-type]
        self.steps += 1  # type: ignore[misc]
        self.scratch += value  # type: ignore[misc]

    def seen(self) -> tuple[list[float], float, float | None, int, float]:
        assert self.tied is self.added
        late = None if self.late is None else self.late.item()
        return self.added.tolist(), self.replaced.item(), late, self.steps.item(), self.scratch.item()  # type: ignore[operator, return-value, union-attr]


def test_each_worker_has_buffers_of_its_own_however_they_change() -> None:
    module = Counter()
    buffers = ModuleBuffers(module, averaged=False)
    buffers.host([2, 5, 7])
    for worker, value in [(5, 1.0), (2, 10.0), (5, 2.0), (7, 0.5), (7, 0.5)]:
        buffers.select(worker)
        module.see(value)
    found = {}
    for worker in (2, 5, 7):
        buffers.select(worker)
        found[worker] = module.seen()
    assert found == {
        2: ([10, 10], 10, 10, 1, 10),
        5: ([3, 3], 3, 3, 2, 3),
        7: ([1, 1], 1, 1, 2, 1),
    }


def test_one_worker_begins_anew_with_the_buffers_that_all_had_first() -> None:
    module = Counter()
    module.see(4.0)
    first = module.seen()
    buffers = ModuleBuffers(module, averaged=False)
    buffers.host([2, 5])
    for worker in (2, 5, 5):
        buffers.select(worker)
        module.see(1.0)
    for _ in range(2):
        buffers.begin_anew(5)
        assert module.seen() == first
        module.see(1.0)
    buffers.select(2)
    assert module.seen() == ([5, 5], 5, 5, 2, 5)


def test_a_lone_worker_computes_with_the_module_as_it_is() -> None:
    module = nn.BatchNorm1d(3)
    own = list(module.buffers())
    buffers = ModuleBuffers(module, averaged=False)
    buffers.host([4])
    buffers.select(4)
    assert all(found is right for found, right in zip(module.buffers(), own, strict=True))


def test_a_module_without_buffers_needs_no_sets() -> None:
    buffers = ModuleBuffers(nn.Linear(2, 1), averaged=True)
    buffers.host(range(3))
    for worker in range(3):
        buffers.select(worker)
    assert (buffers.size, buffers.layout, buffers.values().tolist()) == (0, [], [])


def test_selecting_copies_nothing() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    buffers = ModuleBuffers(module, averaged=False)
    buffers.host([0, 1])
    places: dict[int, list[int]] = {}
    for worker in (0, 1, 0, 1):
        buffers.select(worker)
        found = [buffer.data_ptr() for buffer in module.buffers()]
        assert places.setdefault(worker, found) == found
    assert not set(places[0]) & set(places[1])


# As a vector.


def test_what_is_averaged_is_floating_point_and_persistent_in_order_and_once() -> None:
    buffers = ModuleBuffers(Counter(), averaged=True)
    assert buffers.layout == [["added", [2], "torch.float32"], ["replaced", [], "torch.float64"]]
    assert buffers.size == 3
    buffers = ModuleBuffers(nn.BatchNorm1d(2), averaged=True)
    assert buffers.values().tolist() == [0, 0, 1, 1]
    assert ModuleBuffers(nn.BatchNorm1d(2), averaged=False).size == 0


def test_loading_reaches_all_workers_and_leaves_what_is_not_averaged() -> None:
    module = Counter()
    buffers = ModuleBuffers(module, averaged=True)
    buffers.host([0, 1])
    for worker in (0, 1):
        buffers.select(worker)
        module.see(1.0 + worker)
    assert buffers.finite_values(0).tolist() == [1, 1, 1]
    assert buffers.finite_values(1).tolist() == [2, 2, 2]
    buffers.load(np.array([5, 6, 7], np.float32))
    for worker in (0, 1):
        buffers.select(worker)
        assert module.seen() == ([5, 6], 7, 1.0 + worker, 1, 1.0 + worker)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_travel_as_float32_and_stay(dtype: torch.dtype) -> None:
    module = nn.BatchNorm1d(2).to(dtype)
    buffers = ModuleBuffers(module, averaged=True)
    assert buffers.values().dtype == np.float32
    values = np.array([0.1, 1 + 2.0**-12, 3.0, 4.0], np.float32)
    buffers.load(values)
    assert module.running_mean is not None
    assert module.running_mean.dtype == dtype
    right = torch.from_numpy(values).to(dtype)
    assert module.running_mean.tolist() == right[:2].tolist()
    assert buffers.values().tolist() == right.to(torch.float32).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_a_value_that_float32_does_not_hold_is_not_sent(value: float) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(torch.float64)
    buffers = ModuleBuffers(module, averaged=True)
    buffers.host([3, 4])
    buffers.select(4)
    module.get_buffer("1.running_var")[1] = value
    buffers.finite_values(3)
    with pytest.raises(
        NonFiniteError, match=r"the buffer 1\.running_var of worker 4 has an element that is not"
    ):
        buffers.finite_values(4)


def test_a_buffer_that_is_not_finite_to_begin_with_has_no_mean() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    with pytest.raises(TaskError, match=r'the buffer mask has .* not finite.*`buffers = "local"`'):
        ParameterVector(module, buffers="mean")
    assert ParameterVector(module, buffers="local").dim == 6
    del module.mask
    module.register_buffer("mask", torch.tensor([0.0, float("-inf")]), persistent=False)
    assert ParameterVector(module, buffers="mean").buffers.size == 0


# In the parameter vector.


def vector_of(*layers: nn.Module, buffers: BufferPolicy = "mean") -> ParameterVector:
    torch.manual_seed(0)
    return ParameterVector(nn.Sequential(nn.Linear(2, 2), *layers), buffers=buffers)


def test_the_layout_covers_what_is_averaged() -> None:
    found = [
        vector_of(nn.BatchNorm1d(2)).layout_hash(),
        vector_of(nn.BatchNorm1d(2), buffers="local").layout_hash(),
        vector_of(nn.BatchNorm1d(2, track_running_stats=False)).layout_hash(),
    ]
    # Without an averaged buffer only the parameters count, which are the same.
    assert found[1] == found[2] != found[0]
    double = nn.BatchNorm1d(2)
    double.running_mean = torch.zeros(2, dtype=torch.float64)
    assert vector_of(double).layout_hash() not in found


def test_the_digest_covers_what_is_averaged() -> None:
    for policy, differs in (("mean", True), ("local", False)):
        vector = vector_of(nn.BatchNorm1d(2), buffers=policy)  # type: ignore[arg-type]
        before = vector.digest()
        vector.module.get_buffer("1.running_mean")[0] = 2.0**-149
        assert (vector.digest() != before) is differs


def test_the_saved_model_has_the_mean_and_loads_strictly() -> None:
    vector = vector_of(nn.BatchNorm1d(2))
    vector.buffers.load(np.array([1, 2, 3, 4], np.float32))
    fresh = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fresh.load_state_dict(vector.named_values(), strict=True)
    assert [buffer.tolist() for buffer in fresh.buffers()] == [[1, 2], [3, 4], 0]
    assert "1.running_mean" not in vector_of(nn.BatchNorm1d(2), buffers="local").named_values()


# Computed for several workers in one process.


def oracle(kind: type[TaskOracle], workers: Sequence[int]) -> tuple[TaskOracle, ParameterVector]:
    task, randomness = LocalNorm(), SharedRandomness.from_int(1)
    with torch.random.fork_rng(devices=[]):
        vector = ParameterVector(task.model(), buffers="mean")
    data = {worker: task.data(worker, TaskContext(3, randomness)) for worker in workers}
    return kind(task, vector, data, randomness, batch_size=6, evaluation_batch_size=4), vector


def after(kind: type[TaskOracle], workers: Sequence[int], rounds: int = 4) -> dict[int, list[Tensor]]:
    """Each worker's gradients, evaluation and buffers."""
    computing, vector = oracle(kind, workers)
    found: dict[int, list[Tensor]] = {worker: [] for worker in workers}
    for round_ in range(1, rounds + 1):
        for worker in workers:
            found[worker].append(computing.gradient(worker, round_, 1.0)[2].clone())
    for worker in workers:
        found[worker].append(torch.tensor(computing.evaluate(worker)[0]["loss"]))
        found[worker].append(torch.tensor(computing.loss(worker, 1)[0]))
        vector.buffers.select(worker)
        found[worker] += [buffer.clone() for buffer in vector.module.buffers()]
    return found


def test_workers_hosted_together_compute_as_if_each_were_alone() -> None:
    together = after(TaskOracle, [0, 1, 2])
    for worker in range(3):
        alone = after(TaskOracle, [worker])[worker]
        assert all(torch.equal(*pair) for pair in zip(together[worker], alone, strict=True))
    # The workers' statistics differ, so a shared buffer would have shown.
    assert not torch.equal(together[0][-3], together[1][-3])
    assert together[0][-1].item() == 4


def test_one_batched_call_moves_each_worker_s_buffers() -> None:
    right, found = after(TaskOracle, [0, 1, 2]), after(BatchedOracle, [0, 1, 2])
    for worker in range(3):
        for one, other in zip(found[worker], right[worker], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert found[worker][-1].item() == 4
