"""A module as a program that runs without its Python code: ONNX, by torch's own exporter."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from afl.optional_dependencies import require
from afl.runs.export.calls import Call, Flat, ProgramError, compared, first_line

FILE: Final = "model.onnx"


def write_program(module: nn.Module, sample: Call, folder: Path) -> dict[str, Any]:
    """Write the module (in evaluation mode, on the CPU) into ``folder``, load it again, and compare.

    The sample is a batch of at least two examples. Returned is the program's entry of ``card.json``.

    :class:`ProgramError` if the exporter refuses the module, or the program answers otherwise than it.
    """
    sample.answered(module)
    reference = require("onnx.reference", "write ONNX", "onnx")
    require("onnxscript", "write ONNX", "onnx")
    path, names = str(folder / FILE), sample.names(module)
    try:
        with warnings.catch_warnings():
            # Of the exporter's own future, not of the model.
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                Flat(module, sample).eval(),
                sample.tensors,
                dynamo=True,
                input_names=names,
                dynamic_shapes=(tuple({0: torch.export.Dim.AUTO} for _ in names),),
                verbose=False,
            )
        assert program is not None
        program.save(path)
        evaluator = reference.ReferenceEvaluator(path)
    except Exception as error:
        # The exporter raises whatever the module's code or its own analysis does.
        raise ProgramError(
            f"ONNX: torch's exporter refuses {type(module).__name__}: {first_line(error)}; --predict, "
            "which makes a program of PyTorch's, may take it"
        ) from error

    def answers(call: Call) -> list[Any]:
        given = {name: tensor.numpy() for name, tensor in zip(names, call.tensors, strict=True)}
        # An input that the answers do not depend on is not one of the program's.
        used = {name: given[name] for name in evaluator.input_names}
        return [np.asarray(array, np.float64) for array in evaluator.run(None, used)]

    return {"file": FILE, "format": "ONNX", **compared(module, sample, answers, "ONNX")}
