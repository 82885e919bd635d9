"""A model that was exported, or that a run wrote, in the user's own module again."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from afl.core.model.parameters import digest_of
from afl.errors import ConfigError, DataError
from afl.paths import as_argument, kind_of, naming_paths
from afl.runs.files import METRICS_FILE, model_file, read_model
from afl.runs.shapes import Card, CardTask, read
from afl.tasks.base import Task
from afl.tasks.initialization import build_module
from afl.tasks.registry import load_task, make_task

CARD_FILE = "card.json"
MODEL_FILE = "model.safetensors"


@naming_paths()
def load_model(
    path: str | os.PathLike[str],
    task: type[Task] | Task | str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The module of ``task`` with the stored parameters, in evaluation mode.

    Parameters are stored as float32 and rounded to the module's own types, as they were in training. No code
    is found by what the file says, except that of an installed task by its name.

    Args:
        path: a folder that ``afl export`` wrote, or a model of a run directory (``model-*.safetensors``).
        task: the task's class, or a task; or an installed task's name, or ``package.module:Class``. Without
            it, the installed task that the model was trained with.
        options: of the task, besides or instead of those that it was trained with.
        device: where the module goes.

    Raises:
        ConfigError: if there is no such model, or no task for it.
        DataError: if the file is damaged, is not what its card says, or does not fit the task's module or the
            base model that it loads.
    """
    file, trained = _stored(Path(path))
    made = _task(file, trained.name, task, {**trained.options, **(options or {})})
    module = build_module(made, seed=0)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    own = module.state_dict()
    missing = own.keys() - tensors.keys()
    if wanted := read_model(file).metadata.get("frozen_digest"):
        missing = missing - _base(module, file, wanted)
    if made.buffers == "local":
        missing = missing - {name for name, _ in module.named_buffers(remove_duplicate=False)}
    misfit = _misfit(own, tensors, missing)
    if misfit:
        raise DataError(
            f"{file} does not fit the model of {type(made).__name__}{misfit}; was it trained with other "
            "options, or another version of the task?"
        )
    module.load_state_dict(tensors, strict=False)
    if made.buffers == "local" and has_running_statistics(module):
        warnings.warn(
            f"{file}: the statistics of normalization layers stayed at the workers "
            '(buffers = "local"), so the loaded module has initial ones; let it see data of your own in '
            "training mode before you use it",
            stacklevel=2,
        )
    return module.to(device).eval()


def _base(module: nn.Module, file: Path, wanted: str) -> set[str]:
    """The names of a module's frozen parameters, which each site has of its own.

    Raises:
        DataError: if they are not those that the model was trained on.
    """
    base = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    found = digest_of(sorted((name, p) for name, p in base.items() if p.numel()))
    if found != wanted:
        raise DataError(
            f"{file} was trained on other frozen parameters than the task's model() loads: their digest is "
            f"{found}, the run's {wanted}; give the task the same file"
        )
    return {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a normalization layer computes with statistics that training collects."""
    return any(getattr(layer, "running_mean", None) is not None for layer in module.modules())


def _stored(path: Path) -> tuple[Path, CardTask]:
    """A model's file, and the task that it was trained with; its name is empty if nothing says it."""
    kind = kind_of(path)
    if not kind:
        raise ConfigError(f"{path}: no such file or directory")
    if kind == "folder":
        return path / MODEL_FILE, _task_of_card(path)
    metadata = read_model(path).metadata
    try:
        options = json.loads(metadata.get("task_options", "{}"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its metadata is damaged: task_options is not JSON") from error
    if not isinstance(options, dict):
        raise DataError(f"{path}: its metadata is damaged: task_options is no JSON object")
    return path, CardTask(name=metadata.get("task", ""), options=options)


def _task_of_card(folder: Path) -> CardTask:
    card = read(folder / CARD_FILE, Card)
    if card is None:
        if (folder / METRICS_FILE).exists():
            raise ConfigError(
                f"{folder} is a run directory; name one of its models ({folder / model_file('final')}), or "
                f"export it: afl export {as_argument(folder)}"
            )
        raise ConfigError(f"{folder}: holds no model that afl export wrote (no {CARD_FILE})")
    file = folder / MODEL_FILE
    found = read_model(file).digest
    if found != card.model.digest:
        raise DataError(
            f"{file} is not the model of {CARD_FILE}: its digest is {found}, not {card.model.digest}"
        )
    return card.task


def _task(file: Path, name: str, task: type[Task] | Task | str | None, options: Mapping[str, Any]) -> Task:
    if isinstance(task, Task):
        return task
    if isinstance(task, type):
        return make_task(task, options)
    if task is not None:
        return load_task(task, options, allow_path=True)
    if not name:
        raise ConfigError(f"{file} does not say its task; give it: afl.load_model(path, MyTask)")
    _, _, own = name.partition(":")
    if own:
        raise ConfigError(
            f"{file}: its task is {name}, and code that only a file names is not loaded; give the class: "
            f"afl.load_model(path, {own})"
        )
    return load_task(name, options)


def _misfit(
    own: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor], missing: Collection[str]
) -> str:
    """Why stored tensors do not fit a module's own; empty if they do."""
    if missing:
        return f": it lacks {', '.join(sorted(missing)[:4])}"
    foreign = sorted(tensors.keys() - own.keys())
    if foreign:
        return f", which has no {', '.join(foreign[:4])}"
    for name, tensor in sorted(tensors.items()):
        if tensor.shape != own[name].shape:
            return f": {name} has the shape {list(tensor.shape)}, there {list(own[name].shape)}"
    return ""
