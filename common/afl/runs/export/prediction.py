"""A model that answers without afl and the task's code: a program of PyTorch's, and a script that runs it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from afl.runs.export.calls import Call, Flat, ProgramError, compared, first_line, outputs

PROGRAM_FILE: Final = "model.pt2"
SCRIPT_FILE: Final = "predict.py"

_SCRIPT = '''\
"""Answers of the model in this folder. It needs PyTorch alone: not afl, and not the code it was trained with.

    python predict.py batch.pt              prints the answers
    python predict.py batch.pt answers.pt   writes them

Both files are as torch.save writes them. A batch is a tensor, a tuple of them, or a dictionary by name:
{described}
In Python: from predict import predict
"""

import sys
from pathlib import Path

import torch

NAMES = {names}
TAKES = {described!r}
MODEL = torch.export.load(Path(__file__).with_name("{program}")).module()


def predict(*tensors, **named):
    """The model's answers to a batch, whose tensors are given in order or by name."""
    given = dict(zip(NAMES, tensors)) | named
    if len(tensors) > len(NAMES) or given.keys() != set(NAMES):
        raise TypeError("the model takes " + ", ".join(NAMES))
    with torch.no_grad():
        return MODEL(*(given[name] for name in NAMES))


def described(value):
    is_tensor = isinstance(value, torch.Tensor)
    return f"{{list(value.shape)}} {{value.dtype}}" if is_tensor else type(value).__name__


def main(batch, answers=None):
    try:
        inputs = torch.load(batch, weights_only=True)
    except OSError as error:
        raise SystemExit(f"{{batch}}: {{error.strerror}}")
    except Exception:  # PyTorch's own advice is to run what the file says
        raise SystemExit(f"{{batch}}: no tensors as torch.save writes them")
    if not isinstance(inputs, (dict, list, tuple)):
        inputs = [inputs]
    try:
        found = predict(**inputs) if isinstance(inputs, dict) else predict(*inputs)
    except Exception as error:  # of whatever kind the model's own steps raise
        names = inputs if isinstance(inputs, dict) else range(len(inputs))
        given = ", ".join(f"{{name}} {{described(inputs[name])}}" for name in names)
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise SystemExit(f"{{batch}}: the model takes a batch like {{TAKES}}, not {{given}}: {{why}}")
    print(found) if answers is None else torch.save(found, answers)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit("python predict.py batch.pt [answers.pt]")
    main(*sys.argv[1:])
'''


def write_prediction(module: nn.Module, sample: Call, folder: Path) -> dict[str, Any]:
    """Write the module (in evaluation mode, on the CPU) and the script into ``folder``, and compare.

    The sample is a batch of at least two examples. Returned is the program's entry of ``card.json``.

    Raises:
        ProgramError: if ``torch.export`` refuses the module, or the program answers otherwise than it.
    """
    sample.answered(module)
    names = sample.names(module)
    path = folder / PROGRAM_FILE
    try:
        with warnings.catch_warnings():
            # Of the exporter's own future, not of the model.
            warnings.simplefilter("ignore")
            shapes = (tuple({0: torch.export.Dim.AUTO} for _ in names),)
            program = torch.export.export(Flat(module, sample).eval(), sample.tensors, dynamic_shapes=shapes)
            torch.export.save(program, path)
            loaded = torch.export.load(path).module()
    except Exception as error:
        # The exporter raises whatever the module's code or its own analysis does.
        raise ProgramError(
            f"PyTorch: torch.export refuses {type(module).__name__}: {first_line(error)}"
        ) from error

    def answers(call: Call) -> list[Any]:
        with torch.no_grad():
            return outputs(loaded(*call.tensors))

    entry = {"file": PROGRAM_FILE, "format": "PyTorch", **compared(module, sample, answers, "PyTorch")}
    script = _SCRIPT.format(described=entry["input"], names=names, program=PROGRAM_FILE)
    (folder / SCRIPT_FILE).write_text(script, encoding="utf-8")
    return entry
