"""What a user writes: one class that names the model, each worker's data, the loss and the metrics.

Nothing in a task knows of compression, gRPC or other workers' data. The server builds the same task to
make the initial model; only workers load data.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from afl.core.model.buffers import BufferPolicy
from afl.core.model.parameters import FrozenPolicy
from afl.core.randomness import SharedRandomness
from afl.errors import DataError
from afl.tasks.dtypes import types_problem

Batch: TypeAlias = Any
"""What the task's loss gets: a tuple of tensors, or whatever its dataset collates to."""

Examples: TypeAlias = "Dataset[Any] | Sequence[Tensor]"
"""Either a map-style dataset, or tensors that share their first dimension (faster: no Python per example).

A dataset's examples are collated as torch's ``DataLoader`` does it, or by the dataset's own ``collate_fn``;
they are fetched by its ``__getitems__``, which takes a list of indices, or else one by one.
"""


@dataclass(frozen=True)
class WorkerData:
    """One worker's own examples: those that minibatches are drawn from, and those of its evaluations."""

    train: Examples
    test: Examples


@dataclass(frozen=True)
class TaskContext:
    """What a task may depend on besides its options.

    Attributes:
        workers: m.
        randomness: the run's; partitions are drawn from it, so that every worker computes the same one alone.
    """

    workers: int
    randomness: SharedRandomness


class Task(abc.ABC):
    """A learning problem over ``m`` workers.

    Subclass it, give :meth:`model`, :meth:`data` and, unless :class:`Classification` fits,
    :meth:`loss`. The options of the run's configuration (``task.options``) arrive as keyword arguments
    of ``__init__``; refuse a wrong one with :class:`afl.ConfigError`.
    """

    buffers: ClassVar[BufferPolicy] = "refuse"
    """What becomes of floating-point buffers (BatchNorm's running statistics).

    - ``refuse``: a model that has any is refused.
    - ``local``: each worker keeps its own and is evaluated with them. Saved models are without them
      (``load_state_dict(..., strict=False)``).
    - ``mean``: before each evaluation all workers' are averaged; every worker is evaluated with the mean and
      goes on from it, and saved models hold that of the last evaluation. It is about the persistent buffers
      (those in ``state_dict``). A mean of equal values may differ from them in the last bit.

    Buffers of other types, such as BatchNorm's count of batches, are each worker's own and never averaged.
    What a worker's process has of its own is lost with it: a new one begins with the model's initial buffers,
    and with the present mean of those that are averaged.
    """

    frozen: ClassVar[FrozenPolicy] = "sent"
    """Where parameters with ``requires_grad = False`` come from.

    - ``sent``: from the server, with a worker's first model.
    - ``local``: from each site's own ``model()``, which loads them from a file of the site: a base model that
      is too large to send, under adapters that are trained. A worker whose values are not the server's to the
      bit is refused. They are in no checkpoint and no saved model; ``afl export --with-base`` adds them.
    """

    allow_smaller_batch: ClassVar[bool] = False
    """Whether a worker with fewer training examples than the batch size uses all of them each round."""

    local_options: ClassVar[frozenset[str]] = frozenset()
    """Options that say where a machine keeps its data: the server does not send them, a worker takes them
    from its own command line (``--task-option``) only."""

    @abc.abstractmethod
    def model(self) -> nn.Module:
        """A new module, without looking at data: the server has none.

        Its initial parameters are drawn under the run's seed and sent by the server.
        """

    @abc.abstractmethod
    def data(self, worker: int, context: TaskContext) -> WorkerData:
        """The train and test examples of ``worker`` (0-based); may be called for several workers.

        Raises:
            afl.DataError: if the data is missing (say what to download and where to put it) or the
                worker's part of it is empty.
            afl.ConfigError: if the task cannot be divided among ``context.workers``.
        """

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over ``batch``: a scalar tensor that ``backward`` can be called on."""

    def augment(self, batch: Batch, generator: torch.Generator) -> Batch:  # noqa: ARG002  # for subclasses
        """A minibatch that gradients are computed on, changed at random: crops, flips, noise; as it is by
        default. Losses that no gradient is taken of, and evaluations, see the examples as they are.

        Args:
            batch: of the worker's training examples, on its device; it may be changed in place.
            generator: on the CPU, seeded for this worker and round alone, so that a worker that died repeats
                what it drew: pass it to each draw, and move to the device what was drawn.
        """
        return batch

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Means over ``batch`` of what evaluation reports, as scalar tensors; must contain ``loss``.

        At most 64, each with a name of 1 to 64 ASCII letters, digits, spaces and ``_-.,:;/@%+=*#()[]``.

        A worker's batches of ``task.evaluation_batch_size`` test examples are averaged by their sizes, so
        what is no mean, such as a root, depends on that size: return what is under the root.

        ``accuracy``, where given, ranks the workers (the worst has the lowest), otherwise ``loss`` does; or
        what the configuration names (``evaluation.rank_by``).
        """
        return {"loss": self.loss(model, batch)}

    def inputs(self, batch: Batch) -> Tensor | Sequence[Tensor] | Mapping[str, Tensor]:
        """What the model is called with for ``batch``, where it is to be run without the task: tensors by
        position, or by name. ``afl export`` asks for it.

        By default the first part of a tuple; of a dictionary all but ``label`` and ``labels``, by name.
        """
        if isinstance(batch, Mapping):
            return {name: part for name, part in batch.items() if name not in {"label", "labels"}}
        inputs: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
        return inputs


class Classification(Task):
    """A task whose batches are ``(inputs, labels)`` and whose loss is the mean cross-entropy."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy of ``model(inputs)`` (logits, ``[n, classes]``) against ``labels`` (int64)."""
        return self._scored(model, batch)[1]

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Mean cross-entropy and accuracy."""
        logits, loss = self._scored(model, batch)
        return {"loss": loss, "accuracy": (logits.argmax(dim=1) == batch[1]).to(torch.float64).mean()}

    @staticmethod
    def _scored(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and mean cross-entropy."""
        inputs, labels = batch
        logits: Any = None
        try:
            logits = model(inputs)
            return logits, nn.functional.cross_entropy(logits, labels)
        except (IndexError, RuntimeError) as error:
            problem = types_problem(model, batch, error) if logits is None else _unfit(labels, logits)
            if problem:
                raise DataError(problem) from error
            raise


def _unfit(labels: object, logits: object) -> str:
    """Which of the usual mistakes in the labels torch has stumbled over; empty if it is none of them."""
    if not isinstance(labels, Tensor) or not isinstance(logits, Tensor) or labels.device.type != "cpu":
        return ""
    if labels.dtype != torch.int64:
        return f"the labels of a batch are {labels.dtype}; torch.int64 is needed: convert them in data()"
    classes = logits.shape[1] if logits.dim() > 1 else 0
    if classes and labels.numel():
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= classes:
            return (
                f"the labels of a batch go from {least} to {most}; the model gives {classes} classes, so "
                f"they must be 0 to {classes - 1}"
            )
    return ""


def form_problem(examples: object) -> str:
    """What keeps these from being a worker's examples; empty if nothing does."""
    kind = f"it is a {type(examples).__name__}"
    if isinstance(examples, DataLoader | Dataset):
        return _without_indices(kind, examples)
    if isinstance(examples, Tensor) or not isinstance(examples, Sequence):
        return f"{kind}, not a tuple of tensors or a map-style dataset"
    if not examples or not all(isinstance(part, Tensor) for part in examples):
        kinds = ", ".join(type(part).__name__ for part in examples[:4]) or "nothing"
        return f"it is a sequence of {kinds}; tensors are needed (torch.from_numpy)"
    lengths = [len(part) if part.dim() else 0 for part in examples]
    if len(set(lengths)) > 1:
        return f"its tensors have {lengths} examples; their first dimensions must be equal"
    return ""


def _without_indices(kind: str, examples: object) -> str:
    """Why minibatches cannot be drawn from these by index, as the run's seed says."""
    if isinstance(examples, DataLoader):
        return (
            f"{kind}; return its dataset (loader.dataset): each minibatch is drawn from the run's seed, "
            "of the size in task.batch_size, and made by the dataset's own collate_fn, if it has one"
        )
    if isinstance(examples, IterableDataset):
        return (
            f"{kind}, a stream; minibatches are drawn by index, so that a worker started again repeats "
            "them: write the stream into a file once, and read that with a map-style dataset"
        )
    has_length = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    return "" if has_length else f"{kind} without a length, not a map-style dataset"


def example_count(examples: Examples) -> int:
    """How many examples there are."""
    if isinstance(examples, Dataset):
        return len(examples)  # type: ignore[arg-type]
    return len(examples[0])


def take_batch(examples: Examples, indices: Tensor) -> Batch:
    """The batch of the examples at ``indices`` (int64, ``[n]``, on the device of the examples)."""
    if isinstance(examples, Dataset):
        chosen = indices.tolist()
        fetch = getattr(examples, "__getitems__", None)
        fetched = [examples[index] for index in chosen] if fetch is None else fetch(chosen)
        return getattr(examples, "collate_fn", default_collate)(fetched)
    return tuple(part.index_select(0, indices) for part in examples)
