"""A module as a program that runs without its Python code: ONNX, by torch's own exporter."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from afl.errors import AflError, ConfigError
from afl.optional_dependencies import require

FILE: Final = "model.onnx"
# Of an output, relative to its largest magnitude (or 1); 1e-4 for others: kernels sum in different orders.
TOLERANCES: Mapping[torch.dtype, float] = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
_Outputs: TypeAlias = "list[NDArray[Any]]"


class ProgramError(ConfigError):
    """A module that cannot be made a program, or whose program answers otherwise."""


def write_program(module: nn.Module, sample: Tensor, folder: Path) -> dict[str, Any]:
    """Write the module (in evaluation mode, on the CPU) into ``folder``, load it again, and compare.

    The sample is a batch of at least two examples. Returned is the program's entry of ``card.json``.

    :class:`ProgramError` if the exporter refuses the module, or the program answers otherwise than it.
    """
    _answered(module, sample)
    reference = require("onnx.reference", "write ONNX", "onnx")
    require("onnxscript", "write ONNX", "onnx")
    path = str(folder / FILE)
    shapes = ({0: torch.export.Dim.AUTO},)
    try:
        with warnings.catch_warnings():
            # Of the exporter's own future, not of the model.
            warnings.simplefilter("ignore")
            program = torch.onnx.export(module, (sample,), dynamo=True, dynamic_shapes=shapes, verbose=False)
        assert program is not None
        program.save(path)
        evaluator = reference.ReferenceEvaluator(path)
    except Exception as error:
        # The exporter raises whatever the module's code or its own analysis does.
        raise ProgramError(
            f"ONNX: torch's exporter refuses {type(module).__name__}: {_first_line(error)}"
        ) from error
    difference, tolerance = _compare(module, sample, evaluator)
    any_batch = True
    try:
        # One example more than the program was made with.
        other = _compare(module, torch.cat([sample, sample[:1]]), evaluator)
        difference, tolerance = map(max, (difference, tolerance), other)
    except ProgramError:
        any_batch = False
    return {
        "file": FILE,
        "format": "ONNX",
        "input": f"{list(sample.shape)} {_type_name(sample)}",
        "any_batch": any_batch,
        "largest_difference": difference,
        "tolerance": tolerance,
    }


def _compare(module: nn.Module, sample: Tensor, evaluator: Any) -> tuple[float, float]:
    """The largest difference of the outputs, and the largest that was allowed."""
    wanted = _answered(module, sample)
    try:
        (name,) = evaluator.input_names
        found = [np.asarray(array, np.float64) for array in evaluator.run(None, {name: sample.numpy()})]
    except Exception as error:
        raise ProgramError(f"ONNX: the program cannot be run: {_first_line(error)}") from error
    if [array.shape for array in wanted] != [array.shape for array in found]:
        raise ProgramError("ONNX: the program's outputs have other shapes than the module's")
    largest, allowed = 0.0, 0.0
    precision = max(TOLERANCES.get(p.dtype, 1e-4) for p in [*module.parameters(), sample])
    for one, other in zip(wanted, found, strict=True):
        tolerance = precision * float(np.abs(one).max(initial=1.0))
        difference = float(np.abs(one - other).max(initial=0.0))
        # Written so that NaN fails.
        if not difference <= tolerance:
            raise ProgramError(
                f"ONNX: the program's output differs from the module's by {difference:.3g} on a "
                f"sample (allowed: {tolerance:.3g}); does the model draw random numbers, or keep a state?"
            )
        largest, allowed = max(largest, difference), max(allowed, tolerance)
    return largest, allowed


def _answered(module: nn.Module, sample: Tensor) -> _Outputs:
    try:
        with torch.no_grad():
            return _outputs(module(sample))
    except AflError:
        raise
    except Exception as error:
        raise ProgramError(
            f"the model does not take a batch of shape {list(sample.shape)} and type {_type_name(sample)}: "
            f"{_first_line(error)}; give the shape of one that it takes, as in --input 2x1x28x28"
        ) from error


def _outputs(value: object) -> _Outputs:
    """The tensors in a module's output, in order, as float64."""
    if isinstance(value, Tensor):
        return [value.detach().to(torch.float64).cpu().numpy()]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [array for each in value for array in _outputs(each)]
    raise ProgramError(f"the model's output holds {type(value).__name__}; a program gives tensors only")


def parsed_input(text: str) -> Tensor:
    """A batch of random numbers of a written shape of two examples or more: ``2x1x28x28``, ``2x40:int64``."""
    shape, _, kind = text.partition(":")
    sizes = shape.split("x")
    dtype = getattr(torch, kind or "float32", None)
    if not all(size.isdecimal() for size in sizes) or not isinstance(dtype, torch.dtype) or int(sizes[0]) < 2:
        raise ConfigError(
            f"--input {text}: no batch of at least two examples; write its shape, as in 2x1x28x28 (float32) "
            "or 2x40:int64"
        )
    numbers = torch.randn(list(map(int, sizes)), generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype) if dtype.is_floating_point else (numbers > 0).to(dtype)


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
