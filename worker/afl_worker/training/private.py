"""Gradients and losses that protect each record: clipped one by one, summed, and noised.

Which records a minibatch has, the noise, and what a task draws (dropout, augmentation) come from the site's
own randomness, a fresh key of the operating system for each step. The run's seed, which the server knows,
has no part in it, so nothing here can be repeated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.model.parameters import ParameterVector
from afl.core.randomness import SharedRandomness
from afl.core.record_privacy import Account, RecordPrivacy, require_delta
from afl.core.vectors import Weighted
from afl.errors import ConfigError, TaskError
from afl.optional_dependencies import check_installed
from afl.tasks.base import Batch, Task, WorkerData
from afl.user_code import ending_forks
from afl_worker.training.batched import BatchedOracle, LossModule
from afl_worker.training.examples import mapped
from afl_worker.training.oracle import TaskOracle
from afl_worker.training.per_record import ALIKE, COMPARED, RecordGradients, record_by_record, tensors_of

MEMORY: Final = 256 * 2**20
"""Bytes of the gradients of single records that are held at once; at least one record's are."""


class PrivateOracle(TaskOracle):
    """A :class:`TaskOracle` whose gradients and losses are private, and counted.

    Args:
        records: what is asked for.
        rounds: that are planned.
        memory: of single records' gradients, in bytes.

    Raises:
        ConfigError: if ``delta`` is above 1/n for a worker, the noise cannot be found, or a worker has fewer
            records than a minibatch.
        TaskError: if the model mixes records, or has buffers that are averaged.
    """

    def __init__(
        self,
        task: Task,
        vector: ParameterVector,
        data: Mapping[int, WorkerData],
        randomness: SharedRandomness,
        *,
        records: RecordPrivacy,
        rounds: int,
        batch_size: int,
        memory: int = MEMORY,
        **options: Any,
    ) -> None:
        super().__init__(task, vector, data, randomness, batch_size=batch_size, **options)
        _refuse_mixing(vector)
        for worker in data:
            count = self.train_examples(worker)
            if count < batch_size:
                raise ConfigError(
                    f"worker {worker} has {count} training records, fewer than task.batch_size "
                    f"({batch_size}); with privacy.records a minibatch is drawn among more"
                )
            self.accounts[worker] = Account(
                worker, records, records=count, batch_size=batch_size, rounds=rounds
            )
            if records.metric_noise is not None:
                require_delta(worker, records.delta, self._examples[worker].test.count, "test")
        self._gradients = RecordGradients(type(task).__name__, LossModule(task, vector.module), memory)
        self._has_looked = self._has_looked_at_tests = False
        self._sum = torch.empty_like(vector.values)
        parts = torch.split(self._sum, list(vector.tensors))
        self._sums = {f"module.{name}": part for name, part in zip(vector.names, parts, strict=True)}
        check_installed("cryptography", "draw what privacy.records keeps secret", "records")
        from afl_worker.training.noise import SecretStream  # noqa: PLC0415  # needs cryptography

        self._secret_stream = SecretStream

    def loss(self, worker: int, round_: int) -> tuple[float, int]:
        """Raise ConfigError: a loss on a minibatch of its own is not accounted for."""
        raise ConfigError(
            f"worker {worker}, round {round_}: the algorithm asks for a loss on a minibatch of its own, "
            "which privacy.records does not account for"
        )

    def evaluate(self, worker: int) -> tuple[dict[str, float], int]:
        """As :meth:`TaskOracle.evaluate`, with what has been spent. Test data are told of in full, or as
        means over single records, with noise."""
        account = self.accounts[worker]
        if account.privacy.metric_noise is None:
            means, count = super().evaluate(worker)
        else:
            with ending_forks(), self._spent:
                means, count = self._noised_means(worker, account), self._examples[worker].test.count
        for name in account.told:
            if name in means:
                raise TaskError(
                    f"{type(self._task).__name__}.metrics returned a metric called {name}, which has another "
                    "meaning with privacy.records; give it another name"
                )
        return {**means, **account.told}, count

    def _noised_means(self, worker: int, account: Account) -> dict[str, float]:
        """Of the test records' metrics, each taken of the record alone and clipped.

        Raises:
            TaskError: if the metrics cannot be taken record by record, or are no means of the records'.
        """
        part, privacy = self._examples[worker].test, account.privacy
        self._seed_with(int.from_bytes(os.urandom(8)))
        if not self._has_looked_at_tests:
            few = min(COMPARED, part.count)
            whole, again = (self.metrics(worker, 0, few) for _ in range(2))
            ones = [self.metrics(worker, at, at + 1) for at in range(few)]
            for name, value in whole.items():
                mean = sum(one.get(name, math.nan) for one in ones) / few
                if value == again[name] and not abs(mean - value) <= ALIKE * max(abs(value), 1.0):
                    raise TaskError(
                        f"{type(self._task).__name__}.metrics returned a {name} that is no mean of its "
                        "records', and privacy.records.metrics: noised takes records one by one"
                    )
            self._has_looked_at_tests = True
        account.spend_on_tests()
        limits: dict[str, float] = {}
        sums: dict[str, float] = {}
        module = self.module(worker, training=False)

        def of_one(one: Batch) -> dict[str, torch.Tensor]:
            found = self._task.metrics(module, one)
            return {name: torch.as_tensor(value).double().reshape(()) for name, value in found.items()}

        for start in range(0, part.count, self._evaluation_batch_size):
            stop = min(start + self._evaluation_batch_size, part.count)
            batch = part.batch(torch.arange(start, stop), self._device)
            with torch.no_grad(), self.calls.of(module, batch):
                rows = record_by_record(f"{type(self._task).__name__}.metrics", of_one, batch)
            for name, values in rows.items():
                limit = limits.setdefault(name, privacy.loss_clip if name == "loss" else 1.0)
                clipped = values.nan_to_num(nan=limit, posinf=limit).clamp(0.0, limit)
                sums[name] = sums.get(name, 0.0) + math.fsum((clipped / limit).tolist())
        noised = torch.tensor(list(sums.values()), dtype=torch.float64)
        # One record moves each sum by at most 1, and so all together by the root of how many there are.
        assert privacy.metric_noise is not None
        self._secret_stream().add_normals(noised, privacy.metric_noise * math.sqrt(len(sums)))
        means = (noised / part.count).clamp(0.0, 1.0).tolist()
        return {name: limits[name] * mean for name, mean in zip(sums, means, strict=True)}

    def _gradient(self, worker: int, round_: int, scale: float) -> tuple[float, int, Weighted]:  # noqa: ARG002
        account, part = self.accounts[worker], self._examples[worker].train
        account.spend()
        privacy, size = account.privacy, part.batch_size
        noise, loss_noise = privacy.noises
        secret = self._secret_stream()
        self._seed_with(int.from_bytes(os.urandom(8)))
        batch = part.batch(torch.from_numpy(secret.subset(part.count, size)), self._device)
        _require_rows(f"{type(self._task).__name__}'s data have", batch, size)
        batch = self._augmented_one_by_one(batch)
        self._sum.zero_()
        if not self._has_looked:
            self._has_looked = True
            with self.calls.of(self.module(worker, training=False), batch):
                self._gradients.look_at(batch)
        with self.calls.of(self.module(worker, training=True), batch):
            loss = self._gradients.add_clipped(batch, size, privacy.clip, privacy.loss_clip, self._sums)
        told = torch.tensor([loss], dtype=torch.float64)
        secret.add_normals(told, loss_noise * privacy.loss_clip)
        secret.add_normals(self._sum, noise * privacy.clip)
        return float(told) / size, size, Weighted([self._sum], [len(self._sum)], scale / size)

    def _augmented_one_by_one(self, batch: Batch) -> Batch:
        """Each record as the task augments it alone: what mixes records would let one change them all, and
        one that becomes several would count as often.

        Raises:
            TaskError: if it becomes none, or several.
        """
        if type(self._task).augment is Task.augment:
            return batch
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), signed=True))
        ones = [
            self._task.augment(mapped(lambda tensor, at=at: tensor[at : at + 1], batch), generator)
            for at in range(len(tensors_of(batch)[0]))
        ]
        for one in ones:
            _require_rows(f"{type(self._task).__name__}.augment gave", one, 1)
        return mapped(lambda *tensors: torch.cat(tensors), *ones)


def _require_rows(what: str, batch: Batch, records: int) -> None:
    for tensor in tensors_of(batch):
        if tensor.shape[:1] != (records,):
            raise TaskError(
                f"{what} a tensor of shape {list(tensor.shape)} for {records} "
                f"record{'s' * (records > 1)}; privacy.records clips rows, so each record must be one: "
                "several views of it belong in another dimension"
            )


def _refuse_mixing(vector: ParameterVector) -> None:
    for name, layer in vector.module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001  # the base of all of them
            raise TaskError(
                f"the layer {name or 'model'} ({type(layer).__name__}) mixes the records of a minibatch, so "
                "that none can be protected alone; use GroupNorm or LayerNorm with privacy.records"
            )
    if vector.buffers.size:
        raise TaskError(
            'the model has floating-point buffers that are averaged (`buffers = "mean"`), which '
            'privacy.records does not protect; use `buffers = "local"`'
        )


def make_oracle(
    task: Task,
    vector: ParameterVector,
    data: Mapping[int, WorkerData],
    randomness: SharedRandomness,
    settings: AlgorithmSettings,
    *,
    batched: bool,
    **options: Any,
) -> TaskOracle:
    """The oracle that a run's settings ask for; ``options`` are :class:`TaskOracle`'s.

    Raises what the oracles raise.
    """
    options |= {
        "clip_norm": settings.clip_norm,
        "held_out": settings.held_out,
        "loss_of_held_out": settings.dual_loss_held_out,
    }
    if settings.records is not None:
        private: dict[str, Any] = {"records": settings.records, "rounds": settings.rounds}
        return PrivateOracle(task, vector, data, randomness, **private, **options)
    return (BatchedOracle if batched else TaskOracle)(task, vector, data, randomness, **options)
