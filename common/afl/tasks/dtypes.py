"""Numbers of another type than the model's: torch names the types, and not whose they are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from afl.errors import DataError
from afl.user_code import described

_TORCH_NAMES = {
    torch.float64: ("double", "float64"),
    torch.float32: ("float", "float32"),
    torch.float16: ("half", "float16"),
    torch.bfloat16: ("bfloat16",),
    torch.int64: ("long", "long int", "int64"),
    torch.int32: ("int", "int32"),
    torch.int16: ("short", "short int", "int16"),
    torch.int8: ("char", "signed char", "int8"),
    torch.uint8: ("byte", "unsigned char", "uint8"),
    torch.bool: ("bool",),
}
"""What torch's messages call a type, in small letters: C++'s names and its own."""

_ABOUT_TYPES = re.compile(r"\bdtypes?\b|scalar type|data type|result type|\binput type\b", re.IGNORECASE)

_WORD = re.compile(r"(?:torch\.(?:cuda\.)?)?\b(long int|short int|unsigned char|signed char|[a-z]+[0-9]*)\b")


@contextlib.contextmanager
def telling_types(model: nn.Module, batch: object) -> Iterator[None]:
    """Around a task's loss or metrics of ``batch`` and their gradient.

    Raises:
        DataError: from an error of torch's that is about types of numbers, where something in the batch has
            another type than the model. It says what in the batch that is, and what to do.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        problem = types_problem(model, batch, error)
        if problem:
            raise DataError(f"{problem} ({described(error)})") from error
        raise


def types_problem(model: nn.Module, batch: object, error: BaseException) -> str:
    """Which part of a batch has numbers of another type than the model, if that is what ``error`` is about.

    Empty if it is not.
    """
    text = str(error)
    own = {parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point}
    if not own or not _ABOUT_TYPES.search(text):
        return ""
    others = {name: part.dtype for name, part in _named(batch) if part.dtype not in own}
    named = _types_in(text)
    floating = {name: dtype for name, dtype in others.items() if dtype.is_floating_point}
    if named & own:
        found = {name: dtype for name, dtype in others.items() if dtype in named} or floating
    else:
        found = floating
    if not found:
        return ""
    by_type: dict[torch.dtype, list[str]] = {}
    for name, dtype in found.items():
        by_type.setdefault(dtype, []).append(name)
    parts = ", ".join(
        f"the {' and the '.join(names)} of a batch are {dtype}" for dtype, names in by_type.items()
    )
    if not named & own and torch.int64 in named:
        return f"{parts}, where torch needs integers; convert them in data() with .long()"
    model_is = f"the model is {' and '.join(sorted(map(str, own)))}"
    return f"{parts} and {model_is}; convert them in data(){_how(own)}"


def _how(own: set[torch.dtype]) -> str:
    """To one type that the model has; with several, only the task's author knows which."""
    if len(own) > 1:
        return ""
    (wanted,) = own
    return (
        ' with .float(), or .astype("float32") in numpy'
        if wanted == torch.float32
        else f" with .to({wanted})"
    )


def _types_in(text: str) -> set[torch.dtype]:
    """The types that a message of torch's names."""
    words = {word.removesuffix("tensor") for word in _WORD.findall(text.lower())}
    return {dtype for dtype, names in _TORCH_NAMES.items() if words & set(names)}


def _named(batch: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with what they are for a reader: of a pair the inputs and the targets."""
    if isinstance(batch, Tensor):
        yield "examples", batch
    elif isinstance(batch, Mapping):
        for key, part in batch.items():
            yield from _within(f"values of {key!r}", part)
    elif isinstance(batch, tuple | list):
        names = ["inputs", "targets"] if len(batch) == 2 else [f"values at [{i}]" for i in range(len(batch))]
        for name, part in zip(names, batch, strict=True):
            yield from _within(name, part)


def _within(name: str, part: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield name, part
    else:
        for inner, tensor in _named(part):
            yield f"{inner} in the {name}", tensor
