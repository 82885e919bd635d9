"""FEMNIST with a perceptron, named by its path."""

from __future__ import annotations

import pytest
import torch

from afl.errors import ConfigError
from afl.tasks.registry import load_task
from afl_reproduction.experiment import load_experiment


def test_the_scaling_experiments_model() -> None:
    task = load_experiment("scaling").config("drfa", []).task
    model = load_task(task.name, task.options, allow_path=True).model()
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 62)
    layers = [784 * 64 + 64, 2 * 64, 64 * 64 + 64, 2 * 64, 64 * 62 + 62]
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(layers) == 58_686


def test_options() -> None:
    path = "afl_reproduction.perceptron:FemnistPerceptron"
    model = load_task(path, {"widths": [16], "classes": 10}, allow_path=True).model()
    assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    with pytest.raises(ConfigError, match="did you mean classes"):
        load_task(path, {"clases": 10}, allow_path=True)
