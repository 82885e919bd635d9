"""A run that begins with trained weights: a safetensors file at the server, in place of what was drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from afl.core.model.parameters import ParameterVector
from afl.errors import ConfigError, DataError
from afl.paths import from_start, kind_of, naming_paths
from afl.runs.files import read_model

_OPTION = "run.initial_model"
_MOST_NAMED = 6  # differences in one message


@naming_paths(option=_OPTION)
def load_initial_model(vector: ParameterVector, path: Path) -> None:
    """Replace the module's initial values by those of a file, before anything is made of them.

    The file has every parameter, and every buffer that the workers' are averaged into, under one of its names
    in ``state_dict``: what ``safetensors.torch.save_model`` writes of the module, and what a run saves. What
    does not travel (other buffers) may be there, as the module itself has it. Types may be narrower
    than the module's, or float32 for what is trained, so that no value is rounded.
    :attr:`ParameterVector.initial_digest` is then the file's.

    Raises:
        ConfigError: if there is no such file.
        DataError: if it is damaged or does not fit the module; says what differs.
    """
    path = from_start(path)
    if (kind := kind_of(path)) != "file":
        found = "a folder, no safetensors file" if kind else "no such file"
        raise ConfigError(f"{_OPTION}: {path}: {found}; only the server reads it, when a run begins")
    try:
        digest, tensors = read_model(path).digest, load_file(path)
    except DataError as error:
        raise DataError(f"{_OPTION}: {error}") from error
    tied = _tied(vector)
    own = {name for _, names in tied for name in names}
    problems = [f"the model has no {name}" for name in sorted(tensors.keys() - own)]
    for tensor, names in tied:
        problems += _problems(vector, tensor, {name: tensors.get(name) for name in names})
    if problems:
        shown = "; ".join(problems[:_MOST_NAMED])
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        what = f"{path} does not fit the model {type(vector.module).__name__}: {shown}{more}"
        raise DataError(f"{_OPTION}: {what}{_hint(tensors, own)}")
    with torch.no_grad():
        for tensor, names in tied:
            given = next((tensors[name] for name in names if name in tensors), None)
            if given is not None and vector.is_sent(tensor):
                vector.trained(tensor).copy_(given)
    vector.publish()
    vector.initial_digest = digest


def _tied(vector: ParameterVector) -> Sequence[tuple[Tensor, Sequence[str]]]:
    """What ``state_dict`` holds, each tensor with all its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in vector.module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _problems(vector: ParameterVector, own: Tensor, given: Mapping[str, Tensor | None]) -> Iterator[str]:
    """Why what the file has by a tensor's names cannot be its values."""
    name, *_ = [name for name, value in given.items() if value is not None] or given
    value, is_sent = given[name], vector.is_sent(own)
    if value is None:
        if is_sent and own.numel():
            yield f"the file lacks {name}"
        return
    target = vector.trained(own)
    is_wider = value.is_floating_point() == target.is_floating_point()
    is_wider = is_wider and torch.promote_types(value.dtype, target.dtype) == target.dtype
    if value.shape != own.shape:
        yield f"{name} has the shape {list(value.shape)}, and {list(own.shape)} in the model"
    elif not is_wider and value.dtype != own.dtype:
        kinds = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, own.dtype))
        yield "{} is {}, and {} in the model".format(name, *kinds)
    elif not is_sent:
        # Counts of batches (BatchNorm's) begin anew everywhere.
        is_count = not own.dim() and not own.is_floating_point()
        if not is_count and not torch.equal(value.to(own.dtype), own.detach().cpu()):
            yield f"{name} is not sent to the workers, and has other values than what model() gives it there"
    elif target.is_floating_point() and not bool(torch.isfinite(value.to(target.dtype)).all()):
        yield f"{name} has values that are not finite"
    for other, copy in given.items():
        if other != name and copy is not None and not torch.equal(copy, value):
            yield f"{name} and {other} share their values in the model, and differ in the file"


def _hint(tensors: Mapping[str, Tensor], own: set[str]) -> str:
    """A wrapper's prefix, if that alone is too much."""
    prefix = next(iter(tensors), "").partition(".")[0] + "."
    if own.issuperset(name.removeprefix(prefix) for name in tensors) and not own.issuperset(tensors):
        return f". Without {prefix!r} in front, its names are the model's"
    return ""
