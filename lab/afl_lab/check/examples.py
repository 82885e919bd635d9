"""What one worker's examples are: how many, of which classes, and which of them are equal."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from afl.tasks.base import Examples, example_count, form_problem

MOST_LOOKED_AT = 20_000
"""Examples of one worker that are looked at one by one."""

_DIGEST_BYTES = 12


@dataclass(frozen=True)
class Part:
    """A worker's training or test examples.

    Attributes:
        digests: of the first examples, in order.
        classes: how many of each label, where there are labels; of the examples looked at.
        nbytes: what tensors take; 0 for a data set, which may keep its examples anywhere.
        problem: what is wrong with the form of the examples; empty if nothing is.
        non_finite: the index of the first example with a number that is not finite, or -1.
        largest: the largest absolute value of the inputs.
        is_steady: whether an example that is looked at twice is the same.
    """

    count: int
    digests: tuple[bytes, ...] = ()
    classes: Counter[int] | None = None
    nbytes: int = 0
    problem: str = ""
    non_finite: int = -1
    largest: float = 0.0
    is_steady: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether every example was looked at."""
        return self.count == len(self.digests)

    @property
    def digest(self) -> str:
        """Of all that was looked at, in order, and the count."""
        return _digest(*self.digests, str(self.count).encode()).hex()


def look_at(examples: Examples, most: int = MOST_LOOKED_AT) -> Part:
    """Look at the first ``most`` examples."""
    problem = form_problem(examples)
    if problem:
        return Part(0, problem=problem)
    return _of_dataset(examples, most) if isinstance(examples, Dataset) else _of_tensors(examples, most)


def _of_tensors(parts: Sequence[Tensor], most: int) -> Part:
    count = len(parts[0])
    looked = min(count, most)
    rows = [part[:looked].detach().cpu().contiguous() for part in parts]
    flat = [row.reshape(looked, -1).view(torch.uint8).numpy() for row in rows if row.numel()]
    digests = tuple(_digest(*(row[index].tobytes() for row in flat)) for index in range(looked))
    inputs = rows[0]
    non_finite, largest = -1, 0.0
    if inputs.dtype.is_floating_point and inputs.numel():
        is_finite = torch.isfinite(inputs.reshape(looked, -1)).all(dim=1)
        non_finite = -1 if bool(is_finite.all()) else int((~is_finite).nonzero()[0])
        largest = float(inputs.abs().max())
    classes = None
    if len(rows) > 1 and rows[1].dim() == 1 and _is_whole_number(rows[1]):
        classes = Counter(rows[1].tolist())
    nbytes = sum(part.nbytes for part in parts)
    return Part(count, digests, classes, nbytes, non_finite=non_finite, largest=largest)


def _of_dataset(dataset: Dataset[Any], most: int) -> Part:
    count = example_count(dataset)
    looked = min(count, most)
    digests, labels, non_finite, largest = [], [], -1, 0.0
    for index in range(looked):
        item = dataset[index]
        digests.append(_digest(*_bytes_of(item)))
        first, *others = item if isinstance(item, tuple | list) and item else (item,)
        match others[:1]:
            case [int() | np.integer() as label]:
                labels.append(int(label))
            case [Tensor() as label] if label.numel() == 1 and _is_whole_number(label):
                labels.append(int(label))
        if isinstance(first, Tensor) and first.dtype.is_floating_point and first.numel():
            if non_finite < 0 and not bool(torch.isfinite(first).all()):
                non_finite = index
            largest = max(largest, float(first.abs().max()))
    is_steady = not looked or _digest(*_bytes_of(dataset[0])) == digests[0]
    classes = Counter(labels) if looked and len(labels) == looked else None
    return Part(count, tuple(digests), classes, non_finite=non_finite, largest=largest, is_steady=is_steady)


def _is_whole_number(labels: Tensor) -> bool:
    return not labels.dtype.is_floating_point and not labels.dtype.is_complex


def _bytes_of(item: Any) -> list[bytes]:
    match item:
        case Tensor():
            return [item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()]
        case np.ndarray():
            return [item.tobytes()]
        case dict():
            return [part for key in item for part in (str(key).encode(), *_bytes_of(item[key]))]
        case tuple() | list():
            return [part for entry in item for part in _bytes_of(entry)]
        case _:
            return [repr(item).encode()]


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=_DIGEST_BYTES).digest()
