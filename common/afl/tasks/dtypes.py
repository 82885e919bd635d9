"""Numbers of another type than the model's: torch names the types, and not whose they are."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping

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
    words = {word.removesuffix("tensor") for word in _WORD.findall(text.lower())}
    named = {dtype for dtype, names in _TORCH_NAMES.items() if words & set(names)}
    others = {name: part.dtype for name, part in _named(batch) if part.dtype not in own}
    found = {name: dtype for name, dtype in others.items() if named & own and dtype in named}
    found = found or {name: dtype for name, dtype in others.items() if dtype.is_floating_point}
    if not found:
        return ""
    by_type = {dtype: [name for name in found if found[name] == dtype] for dtype in found.values()}
    parts = ", ".join(
        f"the {' and the '.join(names)} of a batch are {dtype}" for dtype, names in by_type.items()
    )
    if not named & own and torch.int64 in named:
        return f"{parts}, where torch needs integers; convert them in data() with .long()"
    # With several types in the model, only the task's author knows which.
    how = f" with .to({next(iter(own))})" if len(own) == 1 else ""
    if own == {torch.float32}:
        how = ' with .float(), or .astype("float32") in numpy'
    return f"{parts} and the model is {' and '.join(sorted(map(str, own)))}; convert them in data(){how}"


def _named(part: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with what they are for a reader: of a pair the inputs and the targets."""
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(part, Tensor):
        yield name or "examples", part
    elif isinstance(part, Mapping):
        inner = ((f"values of {key!r}", value) for key, value in part.items())
    elif isinstance(part, tuple | list):
        names = ["inputs", "targets"] if len(part) == 2 else [f"values at [{i}]" for i in range(len(part))]
        inner = zip(names, part, strict=True)
    for own, value in inner:
        yield from _named(value, f"{own} in the {name}" if name else own)
