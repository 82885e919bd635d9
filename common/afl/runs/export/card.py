"""The card of an exported model: what a reader, or a program, should know of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from afl._version import __version__
from afl.config import Config, config_digest
from afl.runs.export.source import Source
from afl.runs.metrics import RANK_KEYS
from afl.runs.shapes import EvaluationLine, Line
from afl.runs.sites import SiteRow

FORMAT = 1  # raised when a card's keys change their meaning
BYTES_A_VALUE = 4
_FIGURES = ("worst_accuracy", "mean_accuracy", "max_loss", "mean_loss")
ORIGINS: Mapping[str, str] = {
    "initial_model": "It began with the values of a file of digest `{}`.",
    "frozen_digest": "What was not trained is each site's own and not in the file; its digest is `{}`.",
}
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
    """The card as JSON has it; ``description`` is of the data, in place of the configuration's."""
    config, model = source.config, source.model
    noted = model.metadata.get("trained_parameters")
    trained = int(noted) if noted else sum(tensor.count for tensor in model.tensors)
    whole = BYTES_A_VALUE * trained * config.workers * source.synchronizations
    return {
        "format": FORMAT,
        "model": {
            "name": source.name,
            "round": source.rounds,
            "digest": model.digest,
            "trained_parameters": trained,
            "tensors": len(model.tensors),
            "buffers": model.metadata.get("buffers", "unknown"),
            **{name: model.metadata[name] for name in ORIGINS if name in model.metadata},
        },
        "data": {"description": description or config.run.description, "workers": config.workers},
        "task": config.task.model_dump(mode="json", include={"name", "options", "batch_size"}),
        "algorithm": _settings(config),
        "privacy": config.privacy.model_dump(mode="json", exclude_none=True),
        "evaluation": source.evaluation and _evaluation(source.evaluation, source.rounds),
        "sites": [] if source.sites.hides else [_site(row) for row in source.sites.rows],
        "communication": source.sent and _communication(source.sent, source.synchronizations, whole),
        "run": {
            "id": model.metadata.get("run_id"),
            "state": source.state,
            "state_words": source.state_words,
            "config_digest": config_digest(config),
            "seed": None if config.run.seed is None else f"0x{config.run.seed:032x}",
        },
        "versions": {
            "trained_with_afl": model.metadata.get("afl_versions", model.metadata.get("afl_version")),
            "exported_with": {
                "afl": __version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
            },
        },
        "programs": list(programs),
    }


def _settings(config: Config) -> dict[str, Any]:
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
    for way in ("uplink", "downlink"):
        if algorithm.takes(way):
            compressor = getattr(algorithm, f"{way}_compressor")
            settings[way] = {"name": compressor.name, **compressor.options}
    names = ("dual_loss", "largest_weight", "local_steps", "sampled", "weighting")
    options = {name: value for name in names if (value := getattr(algorithm, name)) is not None}
    options |= {"dual": algorithm.dual_section} if algorithm.dual_section else {}
    return settings | options | algorithm.stepping | algorithm.own


def _evaluation(line: EvaluationLine, rounds: int) -> dict[str, Any]:
    workers = zip_longest(line.workers, line.examples[: len(line.workers)])
    return {
        "round": line.round,
        "is_of_this_model": line.round == rounds,
        **line.model_dump(include={"worst_worker", *_FIGURES}),
        **(line.model_dump(include={"smooth_worst_loss", "means"}) if line.means else {}),
        **(line.model_dump(include=set(RANK_KEYS)) if line.rank_by else {}),
        "workers": [
            {"worker": worker, "examples": examples, **metrics}
            for worker, (metrics, examples) in enumerate(workers)
        ],
    }


def _site(row: SiteRow) -> dict[str, Any]:
    """How a site has fared up to the model, in the metric that ranks."""
    values = {name: getattr(row, name) for name in ("worker", "label", "first", "last", "best", "best_round")}
    return {**values, "first_weight": row.weights[0], "last_weight": row.weights[1]}


def _communication(line: Line, synchronizations: int, whole: int) -> dict[str, Any]:
    return {
        **line.model_dump(include=set(Line.model_fields)),
        "synchronizations": synchronizations,
        "uncompressed_uplink_bytes": whole,
        "uncompressed_downlink_bytes": whole,
        "share_of_uncompressed": (line.uplink_bytes + line.downlink_bytes) / (2 * whole) if whole else None,
    }
