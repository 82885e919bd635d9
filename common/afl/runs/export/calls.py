"""What a model is called with and what it answers: a program is made for that, and compared on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from afl.errors import AflError, ConfigError

# Of an output, relative to its largest magnitude (or 1); 1e-4 for others: kernels sum in different orders.
TOLERANCES: Mapping[torch.dtype, float] = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_Answers: TypeAlias = "list[NDArray[Any]]"


class ProgramError(ConfigError):
    """A module that cannot be made a program, or whose program answers otherwise."""


@dataclass(frozen=True)
class Call:
    """A batch as the model takes it: tensors by position, then by name, that share their first dimension."""

    positional: tuple[Tensor, ...] = ()
    named: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, inputs: object) -> Call | None:
        """Of what :meth:`afl.Task.inputs` returns; ``None`` if that is no tensors."""
        if isinstance(inputs, Mapping):
            call = cls((), dict(inputs))
        else:
            call = cls(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))  # type: ignore[arg-type]
        return call if call.tensors and all(isinstance(each, Tensor) for each in call.tensors) else None

    @classmethod
    def parsed(cls, text: str) -> Call:
        """Random numbers of written shapes, of two examples or more: ``2x1x28x28``, or ``words=2x40:int64,
        mask=2x40:int64``.

        Raises:
            ConfigError: for any other text.
        """
        parts = [part.strip().rpartition("=") for part in text.split(",")]
        tensors = [_drawn(shape, text) for _, _, shape in parts]
        names = [name for name, _, _ in parts if name]
        if len(names) not in {0, len(parts)} or len(set(names)) < len(names):
            raise ConfigError(f"--input {text}: give each input a name of its own, or none of them")
        return cls((), dict(zip(names, tensors, strict=True))) if names else cls(tuple(tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All, in order."""
        return (*self.positional, *self.named.values())

    def names(self, module: nn.Module) -> list[str]:
        """Of the tensors; those by position as the module's ``forward`` names them."""
        own = [
            parameter.name
            for parameter in inspect.signature(module.forward).parameters.values()
            if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        ]
        own += [f"input_{place}" for place in range(len(own), len(self.positional))]
        return own[: len(self.positional)] + list(self.named)

    def described(self, module: nn.Module) -> str:
        """Shapes and types, with names where there are several."""
        texts = [f"{list(tensor.shape)} {type_name(tensor)}" for tensor in self.tensors]
        if len(texts) == 1 and not self.named:
            return texts[0]
        return ", ".join(f"{name} {text}" for name, text in zip(self.names(module), texts, strict=True))

    def with_one_more(self) -> Call:
        """The same with the first example once more."""
        positional = tuple(torch.cat([tensor, tensor[:1]]) for tensor in self.positional)
        named = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in self.named.items()}
        return Call(positional, named)

    def answered(self, module: nn.Module) -> _Answers:
        """The module's answers as float64.

        Raises:
            ProgramError: if the module does not take this.
        """
        try:
            with torch.no_grad():
                return outputs(module(*self.positional, **self.named))
        except AflError:
            raise
        except Exception as error:
            shapes = " and ".join(f"shape {list(t.shape)} and type {type_name(t)}" for t in self.tensors)
            raise ProgramError(
                f"the model does not take a batch of {shapes}: {first_line(error)}; give the shape of one "
                "that it takes, as in --input 2x1x28x28"
            ) from error


class Flat(nn.Module):
    """A module that takes a call's tensors in order, and answers with nothing but tensors."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module = module
        self._positional, self._names = len(call.positional), list(call.named)

    def forward(self, *tensors: Tensor) -> Any:
        """The module's answer as tensors in tuples and dictionaries."""
        named = dict(zip(self._names, tensors[self._positional :], strict=True))
        return _plain(self.module(*tensors[: self._positional], **named))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_plain(each) for each in value)
    return value


def outputs(value: object) -> _Answers:
    """The tensors in a module's output, in order, as float64."""
    if isinstance(value, Tensor):
        return [value.detach().to(torch.float64).cpu().numpy()]
    if isinstance(value, Mapping):
        value = [each for each in value.values() if each is not None]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [array for each in value for array in outputs(each)]
    raise ProgramError(f"the model's output holds {type(value).__name__}; a program gives tensors only")


def compared(
    module: nn.Module, sample: Call, program: Callable[[Call], _Answers], kind: str
) -> Mapping[str, Any]:
    """Compare a program's answers with the module's, on the sample and with one more example, for the card.

    Raises:
        ProgramError: if it does not on the sample.
    """
    difference, tolerance = _difference(module, sample, program, kind)
    any_batch = True
    try:
        other = _difference(module, sample.with_one_more(), program, kind)
        difference, tolerance = map(max, (difference, tolerance), other)
    except ProgramError:
        any_batch = False
    return {
        "input": sample.described(module),
        "any_batch": any_batch,
        "largest_difference": difference,
        "tolerance": tolerance,
    }


def _difference(
    module: nn.Module, sample: Call, program: Callable[[Call], _Answers], kind: str
) -> tuple[float, float]:
    """The largest difference of the outputs, and the largest that was allowed."""
    wanted = sample.answered(module)
    try:
        found = program(sample)
    except Exception as error:
        raise ProgramError(f"{kind}: the program cannot be run: {first_line(error)}") from error
    if [array.shape for array in wanted] != [array.shape for array in found]:
        raise ProgramError(f"{kind}: the program's outputs have other shapes than the module's")
    largest, allowed = 0.0, 0.0
    precision = max(TOLERANCES.get(p.dtype, 1e-4) for p in [*module.parameters(), *sample.tensors])
    for one, other in zip(wanted, found, strict=True):
        tolerance = precision * float(np.abs(one).max(initial=1.0))
        difference = float(np.abs(one - other).max(initial=0.0))
        # Written so that NaN fails.
        if not difference <= tolerance:
            raise ProgramError(
                f"{kind}: the program's output differs from the module's by {difference:.3g} on a "
                f"sample (allowed: {tolerance:.3g}); does the model draw random numbers, or keep a state?"
            )
        largest, allowed = max(largest, difference), max(allowed, tolerance)
    return largest, allowed


def _drawn(text: str, whole: str) -> Tensor:
    shape, _, kind = text.partition(":")
    sizes = shape.split("x")
    dtype = getattr(torch, kind or "float32", None)
    if not all(size.isdecimal() for size in sizes) or not isinstance(dtype, torch.dtype) or int(sizes[0]) < 2:
        raise ConfigError(
            f"--input {whole}: no batch of at least two examples; write its shape, as in 2x1x28x28 "
            "(float32), 2x40:int64, or words=2x40:int64,mask=2x40:int64"
        )
    numbers = torch.randn(list(map(int, sizes)), generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype) if dtype.is_floating_point else (numbers > 0).to(dtype)


def type_name(tensor: Tensor) -> str:
    """``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def first_line(error: object) -> str:
    """Of what an error says, or its kind."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
