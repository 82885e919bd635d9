"""Gradients that protect each record: clipped one by one, drawn and noised in secret."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from afl import Classification, SharedRandomness, Task, TaskContext, WorkerData
from afl.core.randomness import Purpose
from afl.core.record_privacy import METRIC, TESTS_METRIC, RecordPrivacy
from afl.errors import BudgetError, ConfigError, TaskError
from afl.tasks.base import Batch
from afl.tasks.initialization import build_vector
from afl_worker.training.batched import LossModule
from afl_worker.training.per_record import MARGIN, RecordGradients
from afl_worker.training.private import PrivateOracle

QUIET = RecordPrivacy(clip=1e6, loss_clip=1e6, delta=1e-9, noise=1e-12, loss_noise=1e-12)
"""Nothing is clipped, and next to nothing added."""


class Attending(nn.Module):
    """An embedding whose weights are also those of the output, attention over a sequence, LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 6, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.embedding(x.long().clamp(0, 5))).mean(1))
        return out


class Twice(nn.Module):
    """A layer that is called twice, a weight that is used beside its layer, and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.first, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.out.weight.requires_grad = False
        self.low = nn.Linear(6, 6).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        x = self.first(x) + x @ self.first.weight.square()
        out: Tensor = self.out(x + self.low(x.bfloat16()).float())
        return out


class Padded(nn.Module):
    """An embedding that learns nothing from padding, asked by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(6, 8, padding_idx=0), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(input=self.embedding(input=x.long().clamp(0, 5)).mean(1))
        return out


class TwiceInTraining(nn.Module):
    """Layers that in training alone are called twice, or see two views of a record."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if not self.training:
            out: Tensor = self.out(hidden)
            return out
        hidden = hidden + self.first(torch.tanh(x))
        views: Tensor = self.out(torch.stack([hidden, torch.tanh(hidden)], dim=1))
        return views.mean(dim=1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 6)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 6)
    ),
    "attention": Attending,
    "twice": Twice,
    "padded": Padded,
    "twice in training": TwiceInTraining,
}


class Small(Classification):
    """Random records; ``make`` is the model."""

    def __init__(self, make: Callable[[], nn.Module] = MODELS["linear"], records: int = 40) -> None:
        self.make, self.records = make, records

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return self.make()

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        generator = torch.Generator().manual_seed(worker)
        x = 3 * torch.randn(self.records, 6, generator=generator)
        y = torch.randint(6, (self.records,), generator=generator)
        return WorkerData(train=(x, y), test=(x[:4], y[:4]))


def oracle(task: Task, records: RecordPrivacy = QUIET, batch_size: int = 20, **options: Any) -> PrivateOracle:
    randomness = SharedRandomness.from_int(5)
    data = {0: task.data(0, TaskContext(1, randomness))}
    return PrivateOracle(
        task,
        build_vector(task, randomness),
        data,
        randomness,
        records=records,
        rounds=10,
        batch_size=batch_size,
        evaluation_batch_size=8,
        **options,
    )


def gradients(task: Small) -> tuple[RecordGradients, nn.Module]:
    module = LossModule(task, task.model())
    return RecordGradients("Small", module, 2**20), module


def sums_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros(p.numel()) for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory", [1, 2**20])
def test_without_clip_and_noise_it_is_the_plain_gradient(name: str, memory: int) -> None:
    task = Small(MODELS[name])
    one = oracle(task, batch_size=40, memory=memory)
    loss, examples, found = one.gradient(0, 1, 0.5)
    module = one.module(0, training=True)
    data = task.data(0, TaskContext(1, SharedRandomness.from_int(5))).train
    assert isinstance(data, tuple)
    plain = task.loss(module, data)
    plain.backward()  # type: ignore[no-untyped-call]
    plain = plain.detach()
    wanted = torch.cat([p.grad.float().reshape(-1) for p in module.parameters() if p.grad is not None])
    assert (loss, examples) == (pytest.approx(float(plain), rel=1e-5), 40)
    # bfloat16 has three digits.
    tolerance = 2e-2 if name == "twice" else 1e-4
    torch.testing.assert_close(
        found, 0.5 * wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())
    )


def test_gradients_of_a_linear_layer_are_not_made_for_each_record() -> None:
    task = Small()
    found, _ = gradients(task)
    before = found.chunk
    found.look_at((torch.randn(4, 6), torch.tensor([0, 1, 2, 3])))
    assert found.chunk > before
    tied, _ = gradients(Small(Attending))
    before = tied.chunk
    tied.look_at((torch.randn(4, 6), torch.tensor([0, 1, 2, 3])))
    assert tied.chunk == before, "a weight that is used elsewhere too"


wild = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(
    st.sampled_from(["linear", "convolution"]),
    st.lists(st.lists(wild, min_size=6, max_size=6), min_size=3, max_size=3),
    st.lists(wild, min_size=6, max_size=6),
    st.floats(1e-3, 1e3),
    st.floats(1e-2, 50),
)
def test_a_record_that_is_replaced_moves_sums_no_further_than_said(
    name: str, rows: list[list[float]], other: list[float], clip: float, loss_clip: float
) -> None:
    found, module = gradients(Small(MODELS[name]))
    found.look_at((torch.randn(3, 6), torch.tensor([0, 1, 2])))
    labels = torch.tensor([0, 1, 2])
    results = []
    for each in (rows, [*rows[:2], other]):
        sums = sums_of(module)
        loss = found.add_clipped((torch.tensor(each), labels), 3, clip, loss_clip, sums)
        results.append((loss, torch.cat(list(sums.values())).double()))
        assert 0 <= loss <= 3 * loss_clip
        assert float(results[-1][1].norm()) <= 3 * clip
    (loss, sum_), (other_loss, other_sum) = results
    assert abs(loss - other_loss) <= loss_clip * (1 + 1e-9)
    assert float((sum_ - other_sum).norm()) <= 2 * clip


def test_a_record_that_is_not_finite_changes_no_others() -> None:
    class Scaled(nn.Module):
        """What all records are multiplied by is a layer's answer to a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seed", torch.randn(1, 4))
            self.scale, self.out = nn.Linear(4, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.out(x * self.scale(self.seed))
            return out

    found, module = gradients(Small(Scaled))
    x, labels = torch.randn(6, 6), torch.tensor([0, 1, 2, 3, 4, 5])
    found.look_at((x, labels))
    seed = next(module.buffers()).clone()
    fine, broken = sums_of(module), sums_of(module)
    found.add_clipped((x[:5], labels[:5]), 5, 1.0, 5.0, fine)
    x[5] = math.nan
    found.add_clipped((x, labels), 6, 1.0, 5.0, broken)
    for name, own in fine.items():
        torch.testing.assert_close(broken[name], own)
    torch.testing.assert_close(next(module.buffers()), seed, rtol=0, atol=0)
    assert x[5].isnan().all(), "the records are as they were"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=6), st.floats(1e-3, 1e3))
def test_a_record_alone_is_shortened_to_the_clip_and_no_shorter_than_it_was(
    row: list[float], clip: float
) -> None:
    found, module = gradients(Small())
    batch = torch.tensor([row]), torch.tensor([2])
    long, short = sums_of(module), sums_of(module)
    found.add_clipped(batch, 1, math.inf, math.inf, long)
    found.add_clipped(batch, 1, clip, math.inf, short)
    whole, clipped = (torch.cat(list(each.values())).double() for each in (long, short))
    assert float(clipped.norm()) <= clip
    wanted = whole * min(1.0, clip / float(whole.norm()))
    assert float((clipped - wanted).norm()) <= 3 * MARGIN * float(wanted.norm())


def test_the_noise_is_as_wide_as_said() -> None:
    privacy = RecordPrivacy(clip=1e-3, loss_clip=1e-3, delta=1e-9, noise=3e3, loss_noise=7e3)
    one = oracle(Small(), privacy)
    found = np.concatenate([one.gradient(0, round_, 1.0)[2].clone().numpy() for round_ in range(60)])
    # 60 rounds of 150 values: their variance is within a twentieth but one time in a thousand.
    assert 20 * found.std() == pytest.approx(3.0, rel=0.03)
    assert abs(20 * found.mean()) < 5 * 3 / math.sqrt(found.size)
    losses = np.array([one.gradient(0, round_, 1.0)[0] for round_ in range(400)])
    assert 20 * losses.std() == pytest.approx(7.0, rel=0.2)


class OneHot(Small):
    """The gradient of record j has a 1 at j: what was drawn can be read off."""

    def model(self) -> nn.Module:
        return nn.Linear(self.records, 1, bias=False)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        x = torch.eye(self.records)
        return WorkerData(train=(x, torch.zeros(self.records, dtype=torch.int64)), test=(x, x[0].long()))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        loss: Tensor = model(batch[0]).mean()
        return loss


def test_who_knows_the_seed_does_not_know_the_minibatch() -> None:
    records, size, rounds = 200, 50, 60
    one, again = (oracle(OneHot(records=records), batch_size=size) for _ in range(2))

    def drawn(of: PrivateOracle, round_: int) -> set[int]:
        chosen = of.gradient(0, round_, 1.0)[2].numpy() > 0.5 / size
        return set(np.flatnonzero(chosen).tolist())

    randomness, by_seed, by_other = SharedRandomness.from_int(5), [], []
    for round_ in range(1, rounds + 1):
        mine = drawn(one, round_)
        assert len(mine) == size
        by_seed.append(len(mine & set(randomness.stream(Purpose.MINIBATCH, round_, 0).subset(records, size))))
        by_other.append(len(mine & drawn(again, round_)))
    # As many as by chance: 12.5 of 50, with a standard deviation of 2.66 in one round.
    for overlaps in (by_seed, by_other):
        assert abs(np.mean(overlaps) - 12.5) < 5 * 2.66 / math.sqrt(rounds)


class Mixing(Small):
    """Augmentation that adds all records up."""

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        assert isinstance(batch, tuple)
        return batch[0] + batch[0].sum(0), batch[1]


def test_augmentation_cannot_mix_records() -> None:
    class Doubled(Small):
        def data(self, worker: int, context: TaskContext) -> WorkerData:
            found = super().data(worker, context)
            assert isinstance(found.train, tuple)
            return WorkerData(train=(2 * found.train[0], found.train[1]), test=found.test)

    mixed, doubled = (oracle(task, batch_size=40).gradient(0, 1)[2] for task in (Mixing(), Doubled()))
    torch.testing.assert_close(mixed, doubled, rtol=1e-4, atol=1e-5)


class Summed(Small):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


class Few(Small):
    allow_smaller_batch = True


class Normed(Small):
    buffers = "local"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


class Averaged(Small):
    buffers = "mean"

    def model(self) -> nn.Module:
        module = super().model()
        module.register_buffer("scale", torch.ones(3))
        return module


class Item(Small):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        return loss if loss.item() > 0 else -loss


class Counting(Small):
    """A model that follows the mean of what it sees, in place or by another tensor."""

    buffers = "local"
    in_place = True

    def model(self) -> nn.Module:
        module = super().model()
        module.register_buffer("seen", torch.zeros(6))
        return module

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        if self.in_place:
            model.seen.add_(batch[0].mean(0))  # type: ignore[operator, union-attr]
        elif model.training:
            model.seen = 0.9 * model.seen + batch[0].mean(0)  # type: ignore[operator]
        return super().loss(model, batch)


class Following(Counting):
    in_place = False


class Cached(Small):
    """A model that keeps a parameter in a list."""

    def model(self) -> nn.Module:
        module = super().model()
        self.kept = [next(module.parameters())]
        return module

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        scores = batch[0] @ self.kept[0][:6].T + sum(p.sum() for p in model.parameters())
        return nn.functional.cross_entropy(scores, batch[1])


class Doubling(Small):
    """Augmentation that makes two records of one."""

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        assert isinstance(batch, tuple)
        return torch.cat([batch[0]] * 2), torch.cat([batch[1]] * 2)


class Dropping(Small):
    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:
        assert isinstance(batch, tuple)
        return batch[0][:0], batch[1][:0]


class Detached(Small):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch).detach()


class Each(Small):
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: oracle(Doubling()).gradient(0, 1), TaskError, "augment gave a tensor of shape .2, 6. for 1"),
        (lambda: oracle(Dropping()).gradient(0, 1), TaskError, "augment gave a tensor of shape .0, 6. for 1"),
        (lambda: oracle(Detached()).gradient(0, 1), TaskError, "does not depend on the parameters"),
        (lambda: oracle(Each()).gradient(0, 1), TaskError, "a tensor of shape .4.; a scalar tensor"),
        (lambda: oracle(Normed()), TaskError, "the layer 1 .BatchNorm1d. mixes the records"),
        (lambda: oracle(Averaged()), TaskError, "floating-point buffers that are averaged"),
        (lambda: oracle(Summed()).gradient(0, 1), TaskError, "is no mean of its records' losses"),
        (lambda: oracle(Item()).gradient(0, 1), TaskError, "cannot be taken record by record"),
        (lambda: oracle(Counting()).gradient(0, 1), TaskError, "changes a buffer .seen. when it is called"),
        (lambda: oracle(Following()).gradient(0, 1), TaskError, "changes a buffer .seen. when it is called"),
        (lambda: oracle(Cached()).gradient(0, 1), TaskError, "loss gives 0.weight another gradient when"),
        (lambda: oracle(Few(records=19)), ConfigError, "19 training records, fewer than task.batch_size"),
        (lambda: oracle(Small()).loss(0, 1), ConfigError, "a loss on a minibatch of its own"),
    ],
)
def test_what_cannot_be_protected_is_refused(make: Callable[[], object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_evaluations_tell_what_was_spent() -> None:
    one = oracle(Small(), RecordPrivacy(1.0, 5.0, 1e-3, noise=30.0))
    before, _ = one.evaluate(0)
    one.gradient(0, 1)
    after, _ = one.evaluate(0)
    assert before[METRIC] == 0.0 < after[METRIC] < 10
    assert {name for name in after if name != METRIC} == {name for name in before if name != METRIC}


TOLD = RecordPrivacy(1.0, 2.0, 1e-3, noise=30.0, metric_noise=1e-9)


def test_noised_metrics_are_means_over_clipped_records() -> None:
    plain, _ = oracle(Small()).evaluate(0)
    found, count = oracle(Small(), replace(TOLD, loss_clip=100.0)).evaluate(0)
    assert count == 4
    assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(plain["accuracy"], abs=1e-6)
    clipped, _ = oracle(Small(), replace(TOLD, loss_clip=1e-3)).evaluate(0)
    assert clipped["loss"] == pytest.approx(1e-3, rel=1e-5), "each record's loss is above the limit"


def test_the_noise_of_metrics_is_as_wide_as_said_and_counted() -> None:
    class Many(Small):
        def data(self, worker: int, context: TaskContext) -> WorkerData:
            found = super().data(worker, context)
            assert isinstance(found.train, tuple)
            return WorkerData(train=found.train, test=found.train)

    one = oracle(Many(), replace(TOLD, metric_noise=0.5, loss_clip=10.0))
    found = [one.evaluate(0)[0] for _ in range(300)]
    # Of 40 records and two metrics.
    width = 0.5 * math.sqrt(2) / 40
    assert np.std([each["loss"] for each in found]) == pytest.approx(10 * width, rel=0.2)
    assert np.std([each["accuracy"] for each in found]) == pytest.approx(width, rel=0.2)
    spent = [each[TESTS_METRIC] for each in found]
    assert spent == sorted(set(spent))
    assert one.accounts[0].evaluations == 300
    assert found[-1][METRIC] == 0.0


def test_test_records_have_a_budget_too() -> None:
    one = oracle(Small(), RecordPrivacy(1.0, 5.0, 1e-3, noise=4.0, metric_noise=2.0))
    one.accounts[0].limit(3.0)
    last = 0.0

    def evaluate_on() -> None:
        nonlocal last
        for _ in range(100):
            last = one.evaluate(0)[0][TESTS_METRIC]

    with pytest.raises(BudgetError, match="epsilon of 3 on each test record"):
        evaluate_on()
    assert 2 < last <= 3


class Spread(Small):
    """A metric that is no mean over records."""

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(batch, tuple)
        return {"loss": self.loss(model, batch), "spread": batch[0].std()}


class Unrolled(Small):
    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": torch.tensor(self.loss(model, batch).item())}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Spread(), "metrics returned a spread that is no mean of its records'"),
        (Unrolled(), "Unrolled.metrics cannot be taken record by record"),
    ],
)
def test_metrics_that_cannot_be_taken_of_one_record_are_refused(task: Task, message: str) -> None:
    one = oracle(task, TOLD)
    with pytest.raises(TaskError, match=message):
        one.evaluate(0)


def test_a_gradient_of_any_length_is_shortened_to_the_limit() -> None:
    class Steep(Small):
        def model(self) -> nn.Module:
            return nn.Linear(1, 1, bias=False)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            assert isinstance(batch, tuple)
            loss: Tensor = model(batch[0]).mean()
            return loss

    found, module = gradients(Steep())
    for length in 10.0 ** np.arange(25, 38.5, 0.1):
        sums = sums_of(module)
        batch = (torch.full((1, 1), length), torch.zeros(1, dtype=torch.int64))
        found.add_clipped(batch, 1, 1e-7, 1.0, sums)
        (total,) = sums.values()
        assert float(total.abs().max()) <= 1e-7
