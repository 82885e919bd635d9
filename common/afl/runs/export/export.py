"""Writes one of a run's models into a folder of its own, with a card, and optionally as ONNX."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from afl.core.randomness import SharedRandomness
from afl.errors import AflError, ConfigError, StorageError, why_unwritable
from afl.paths import from_start, kind_of, naming_paths
from afl.runs.export.calls import Call
from afl.runs.export.card import card_of
from afl.runs.export.card_page import page_of
from afl.runs.export.loading import CARD_FILE, MODEL_FILE, has_running_statistics, load_model
from afl.runs.export.onnx import write_program
from afl.runs.export.prediction import write_prediction
from afl.runs.export.source import Source, find
from afl.runs.files import read_model
from afl.tasks.base import Task, TaskContext, example_count, take_batch
from afl.tasks.initialization import worker_data
from afl.tasks.registry import load_task
from afl.user_code import calling

PAGE_FILE = "README.md"


@naming_paths()
def export(
    directory: Path,
    model: str,
    out: Path,
    *,
    force: bool = False,
    onnx: bool = False,
    task: str | None = None,
    shape: str | None = None,
    description: str | None = None,
    with_base: bool = False,
    predict: bool = False,
) -> dict[str, Any]:
    """Write the folder, whole or not at all; the card.

    Args:
        force: replace what an earlier export wrote to ``out``.
        task: ``package.module:Class``, for what needs the module of a task that is not installed.
        shape: of a batch, for a program; by default examples of worker 0 are taken.
        predict: add a script that runs without afl, and the program that it runs.
        with_base: add the frozen parameters that are each site's own, as the task loads them here.

    Raises:
        ConfigError: if no such model is there, the folder is taken, or a program needs what is not given.
        DataError: if the run's files are damaged, or a task's data is missing.
        ProgramError: if a program cannot be made, or answers otherwise than the module.
        StorageError: if the folder cannot be written.
    """
    if kind := kind_of(out):
        is_taken = kind == "file" or any(out.iterdir())
        if is_taken and not (out / CARD_FILE).is_file():
            raise ConfigError(
                f"--out {out}: already exists, and was not written by afl export (it has no {CARD_FILE}), so "
                "nothing is written there; name another folder"
            )
        if is_taken and not force:
            raise ConfigError(
                f"--out {out}: holds an exported model; name another folder, or --force to replace it"
            )
    try:
        with _replacing_folder(from_start(out)) as folder:
            found = find(directory, model, folder / MODEL_FILE)
            if with_base:
                found = _with_base(found, folder / MODEL_FILE, _task(found, task))
            writers = [write_program] * onnx + [write_prediction] * predict
            programs = _programs(found, folder, task, shape, writers) if writers else []
            card = card_of(found, description, programs)
            (folder / CARD_FILE).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
            (folder / PAGE_FILE).write_text(page_of(card), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{out} cannot be written: {why_unwritable(error)}; name another folder with --out"
        ) from error
    return card


@contextmanager
def _replacing_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its place once it is complete."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        yield new
        if out.exists():
            out.rename(Path(temporary) / "replaced")
        new.rename(out)


def _task(found: Source, name: str | None) -> Task:
    own = found.config.task
    if ":" in own.name and name is None:
        raise ConfigError(
            f"this takes the task's module, and the code of {own.name} is loaded only if the command line "
            f"names it: add --task {own.name}"
        )
    return load_task(name or own.name, own.options, allow_path=True)


def _with_base(found: Source, file: Path, task: Task) -> Source:
    """Add to a model's file what it has been trained on; nothing, where nothing is missing."""
    metadata = dict(found.model.metadata)
    if not metadata.pop("frozen_digest", ""):
        return found
    tensors = load_file(file)
    base = load_model(file, task).named_parameters(remove_duplicate=False)
    tensors |= {name: p.detach().contiguous().clone() for name, p in base if name not in tensors}
    save_file(tensors, file, metadata)
    return replace(found, model=read_model(file))


def _programs(
    found: Source,
    folder: Path,
    task_name: str | None,
    shape: str | None,
    writers: Sequence[Callable[[nn.Module, Call, Path], dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Write and check programs; what the card says of them."""
    task = _task(found, task_name)
    with warnings.catch_warnings():
        # Of initial statistics, which are refused here, or constant.
        warnings.simplefilter("ignore", UserWarning)
        module = load_model(folder / MODEL_FILE, task)
    if task.buffers == "local" and has_running_statistics(module):
        raise ConfigError(
            "a program would hold initial statistics of its normalization layers and answer wrongly: the "
            'trained ones stayed at the workers (buffers = "local" in the task); export the parameters '
            'alone, or train with buffers = "mean"'
        )
    sample = _sample(found, task) if shape is None else Call.parsed(shape)
    return [write(module, sample, folder) for write in writers]


def _sample(found: Source, task: Task) -> Call:
    """Two test examples of worker 0, as the model takes them."""
    config = found.config
    context = TaskContext(config.workers, SharedRandomness.from_int(config.run.seed or 0))
    try:
        examples = worker_data(task, 0, context).test
    except AflError as error:
        raise _no_sample(f"data is not here ({error})") from error
    count = example_count(examples)
    # One would hide what a batch's size is mixed up with.
    batch = take_batch(examples, torch.arange(2) % count) if count else None
    if batch is None:
        raise _no_sample("has no test examples")
    what = f"{type(task).__name__}.inputs"
    with calling(what):
        call = Call.of(task.inputs(batch))
    if call is None:
        raise _no_sample(f"batches have no tensors that {what} finds (write that method)")
    return call


def _no_sample(why: str) -> ConfigError:
    return ConfigError(
        f"a program is checked on a sample, and worker 0's {why}; give the shape of a batch instead, as in "
        "--input 2x1x28x28"
    )
