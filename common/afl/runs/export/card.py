"""The card of an exported model: what a reader, or a program, should know of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from afl._version import __version__
from afl.config import Config, config_digest
from afl.runs.export.source import Source

FORMAT = 1
"""Raised when a card's keys change their meaning."""

BYTES_A_VALUE = 4

BUFFERS: Mapping[str, str] = {
    "none": "The model has no floating-point buffers.",
    "mean": "Floating-point buffers (such as BatchNorm's running statistics) are the mean of the workers', "
    "of the last evaluation before this model was written.",
    "local": "Floating-point buffers (such as BatchNorm's running statistics) stayed at the workers and are "
    "not in the file. Each worker's figures below were measured with its own. A loaded module has initial "
    "ones: let it see data of yours in training mode before you use it.",
    "unknown": "The run was written by a version of afl that did not note what became of buffers.",
}


def card_of(
    source: Source, description: str | None, programs: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The card as JSON has it.

    Args:
        description: of the data; without it, the configuration's.
        programs: what was written besides the parameters.
    """
    config, model = source.config, source.model
    return {
        "format": FORMAT,
        "model": {
            "name": source.name,
            "round": source.rounds,
            "digest": model.digest,
            "trained_parameters": _trained(source),
            "tensors": len(model.tensors),
            "buffers": model.metadata.get("buffers", "unknown"),
        },
        "data": {"description": description or config.run.description, "workers": config.workers},
        "task": {
            "name": config.task.name,
            "options": dict(config.task.options),
            "batch_size": config.task.batch_size,
        },
        "algorithm": settings_of(config),
        "evaluation": _evaluation(source),
        "communication": _communication(source),
        "run": {
            "id": model.metadata.get("run_id"),
            "state": source.state,
            "state_words": source.state_words,
            "config_digest": config_digest(config),
            "seed": None if config.run.seed is None else f"0x{config.run.seed:032x}",
        },
        "versions": {"trained_with_afl": model.metadata.get("afl_version"), "exported_with": _versions()},
        "programs": [dict(program) for program in programs],
    }


def settings_of(config: Config) -> dict[str, Any]:
    """The algorithm's settings as numbers, without what it does not use."""
    algorithm = config.algorithm
    settings: dict[str, Any] = {
        "name": algorithm.name,
        "rounds": algorithm.rounds,
        "eta_w": algorithm.eta_w_value,
    }
    if algorithm.eta_q is not None:
        settings["eta_q"] = config.eta_q_value
    if algorithm.takes("block"):
        settings["block"] = algorithm.block_length
    for way, compressor in (
        ("uplink", algorithm.uplink_compressor),
        ("downlink", algorithm.downlink_compressor),
    ):
        if algorithm.takes(way):
            settings[way] = {"name": compressor.name, **compressor.options}
    for option in ("local_steps", "sampled", "weighting"):
        value = getattr(algorithm, option)
        if value is not None:
            settings[option] = value
    return {**settings, **algorithm.own}


def _trained(source: Source) -> int:
    noted = source.model.metadata.get("trained_parameters")
    return int(noted) if noted else sum(tensor.count for tensor in source.model.tensors)


def _evaluation(source: Source) -> dict[str, Any] | None:
    line = source.evaluation
    if line is None:
        return None
    examples = line.get("examples", [])
    return {
        "round": line["round"],
        "is_of_this_model": line["round"] == source.rounds,
        "worst_worker": line["worst_worker"],
        "worst_accuracy": line["worst_accuracy"],
        "mean_accuracy": line["mean_accuracy"],
        "max_loss": line["max_loss"],
        "mean_loss": line["mean_loss"],
        "workers": [
            {"worker": worker, "examples": examples[worker] if worker < len(examples) else None, **metrics}
            for worker, metrics in enumerate(line["workers"])
        ],
    }


def _communication(source: Source) -> dict[str, Any] | None:
    line = source.sent
    if line is None:
        return None
    up, down = line["uplink_bytes"], line["downlink_bytes"]
    whole = BYTES_A_VALUE * _trained(source) * source.config.workers * source.synchronizations
    return {
        "round": line["round"],
        "synchronizations": source.synchronizations,
        "uplink_bytes": up,
        "downlink_bytes": down,
        "uplink_float_equivalents": line["uplink_float_equivalents"],
        "downlink_float_equivalents": line["downlink_float_equivalents"],
        "uncompressed_uplink_bytes": whole,
        "uncompressed_downlink_bytes": whole,
        "share_of_uncompressed": (up + down) / (2 * whole) if whole else None,
    }


def _versions() -> dict[str, str]:
    return {
        "afl": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
