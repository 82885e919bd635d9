"""Tasks that misbehave, given to the commands as ``tests_tasks:Name`` as a user's own would be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from afl import Task, TaskContext, WorkerData
from afl.tasks.base import Batch
from afl.tasks.synthetic import Synthetic


class Slow(Synthetic):
    """``synthetic`` with a pause before each gradient, the same to the bit."""

    def __init__(self, pause: float = 0.005, **options: object) -> None:
        super().__init__(**options)
        self.pause = pause

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training:
            time.sleep(self.pause)
        return super().loss(model, batch)


class Grown(Synthetic):
    """``synthetic`` with as many training examples as ``GROWN`` in its environment says, or 32."""

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        found = super().data(worker, context)
        assert isinstance(found.train, tuple)
        count = int(os.environ.get("GROWN", "32"))
        return WorkerData(train=tuple(part[:count] for part in found.train), test=found.test)


class Hurried(Synthetic):
    """``synthetic`` with a pause before each gradient until the file is there that ``HURRY`` in its
    environment names; the same to the bit."""

    def __init__(self, pause: float, **options: object) -> None:
        super().__init__(**options)
        self._pause, self._file = pause, Path(os.environ["HURRY"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        until = time.monotonic() + self._pause
        while model.training and time.monotonic() < until and not self._file.exists():
            time.sleep(0.02)
        return super().loss(model, batch)


class _Ones(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.ones(())


class Forking(Slow):
    """``Slow``, the same to the bit, with forked processes: a DataLoader's, and one that never ends.

    All are a process group, so that a test can signal them as a terminal does.
    """

    _ones: Iterator[Tensor] | None = None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._ones is None:
            os.setpgrp()
            multiprocessing.get_context("fork").Process(target=_never_end, daemon=True).start()
            loader: DataLoader[Any] = DataLoader(
                _Ones(), batch_size=None, num_workers=2, multiprocessing_context="fork"
            )
            self._ones = iter(loader)
        return super().loss(model, batch) * next(self._ones)


class Threaded(Slow):
    """``Slow``, the same to the bit, with a thread that never ends and that Python waits for."""

    def model(self) -> nn.Module:
        threading.Thread(target=threading.Event().wait, name="prefetch").start()
        return super().model()


class Wandering(Slow):
    """``Slow``, the same to the bit, in a folder of its own."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        os.chdir("/")
        return super().loss(model, batch)

    def model(self) -> nn.Module:
        os.chdir("/")
        return super().model()


class ForkingModel(Slow):
    """The same, with a process that never ends wherever its model is made: at the server too."""

    def model(self) -> nn.Module:
        multiprocessing.get_context("fork").Process(target=_never_end, daemon=True).start()
        return super().model()


def _never_end() -> None:
    while True:
        time.sleep(1.0)


class _Linear(Task):
    """Four features, one output, sixteen examples."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        generator = torch.Generator().manual_seed(worker)
        inputs = torch.randn(20, 4, generator=generator)
        return WorkerData(train=(inputs[:16],), test=(inputs[16:],))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        (inputs,) = batch
        output: Tensor = model(inputs)
        return output.square().mean()


class Troubled(_Linear):
    """Every worker from 1 on has a trouble of its own; worker 0 is well."""

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        self._worker = worker
        whole = super().data(worker, context)
        size = {1: 0, 2: 3}.get(worker, 16)
        return WorkerData(train=(whole.train[0][:size],), test=whole.test)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._worker == 3:
            raise RuntimeError("no luck today")
        return super().loss(model, batch)


class Diverging(_Linear):
    """The loss of worker 1 is not a number from its fifth minibatch on."""

    def __init__(self) -> None:
        self._batches = 0

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        self._worker = worker
        return super().data(worker, context)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        self._batches += model.training
        return loss * float("nan") if self._worker == 1 and self._batches >= 5 else loss


class Normalized(_Linear):
    """A model with running statistics and no word on what becomes of them."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Frozen(_Linear):
    """A model with nothing to train."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 1).requires_grad_(False)


class LocalNorm(Task):
    """A regression with BatchNorm on inputs that differ from worker to worker; each keeps its statistics."""

    buffers = "local"

    def model(self) -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1))

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        generator = torch.Generator().manual_seed(worker)
        inputs = (1 + worker) * torch.randn(21, 4, generator=generator) + worker
        targets = inputs.sum(dim=1, keepdim=True).sin()
        return WorkerData(train=(inputs[:14], targets[:14]), test=(inputs[14:], targets[14:]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)


class MeanNorm(LocalNorm):
    """The same with the mean of the workers' statistics."""

    buffers = "mean"


class SlowMeanNorm(MeanNorm):
    """The same with a pause before each gradient."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(0.005)
        return super().loss(model, batch)


class PartlyFrozen(MeanNorm):
    """The same with a layer that is not trained."""

    def model(self) -> nn.Module:
        model = super().model()
        next(model.parameters()).requires_grad_(False)
        return model


class Mortal(MeanNorm):
    """The same, whose process is killed at the minibatch that ``DIES_AT`` in its environment counts to."""

    def __init__(self) -> None:
        self._left = int(os.environ.get("DIES_AT", "0"))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if model.training and self._left:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class Poisoned(_Linear):
    """Worker 1 has a training example that is not a number: its gradient is none whenever that is drawn."""

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        whole = super().data(worker, context)
        if worker == 1:
            whole.train[0][3] = float("nan")
        return whole


class Unlucky(_Linear):
    """Memory runs out, a helper process is killed, the process ends, or a line of afl's own fails, as its
    option says."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._helped: Iterator[Tensor] | None = None

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        if self._of == "afl":
            from afl_worker import journal  # noqa: PLC0415  # the server loads this module too

            journal._write = None  # type: ignore[assignment]  # noqa: SLF001
        return super().data(worker, context)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self._of == "memory":
            torch.empty(1 << 56)
        if self._of == "exit":
            if (child := os.fork()) == 0:
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, "a forked process ends as it pleases"
            os._exit(0)
        if self._of == "helper":
            self._helped = self._helped or iter(DataLoader(_Doomed(), num_workers=1))
            next(self._helped)
        return super().loss(model, batch)


class _Doomed(Dataset[Tensor]):
    """Each who reads of it is killed, as by a kernel that is short of memory."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Wide(_Linear):
    """A model of 40 MB."""

    FEATURES = 10_000_000

    def model(self) -> nn.Module:
        return nn.Linear(self.FEATURES, 1)

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        return WorkerData(train=(torch.ones(1, self.FEATURES),), test=(torch.ones(1, self.FEATURES),))
