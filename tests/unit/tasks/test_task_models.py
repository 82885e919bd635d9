from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from afl.tasks.data.models import cifar_cnn, femnist_cnn, mlp


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_leafs_cnn_has_leafs_number_of_parameters() -> None:
    with torch.device("meta"):
        assert count(femnist_cnn()) == 6_603_710


def test_widths_are_parameters() -> None:
    with torch.device("meta"):
        assert count(mlp(784, (256, 128), 10)) == 235_914
        assert count(mlp(4, (), 3)) == 15
        assert count(cifar_cnn()) == 896 + 18_496 + 40_970
        assert count(femnist_cnn(hidden=100, classes=10)) == 832 + 51_264 + 313_700 + 1_010
        assert count(femnist_cnn(64, 62, (8, 16))) == 208 + 3_216 + 50_240 + 4_030


@pytest.mark.parametrize(
    ("build", "shape", "classes"),
    [
        (lambda: mlp(64, (64, 32), 10), (1, 8, 8), 10),
        (lambda: mlp(784, (256, 128), 10), (1, 28, 28), 10),
        (cifar_cnn, (3, 32, 32), 10),
        (lambda: femnist_cnn(hidden=64), (1, 28, 28), 62),
    ],
    ids=["digits", "fashion-mnist", "cifar10", "femnist"],
)
def test_one_gradient_step_lowers_the_loss(
    build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int
) -> None:
    torch.manual_seed(0)
    model = build()
    inputs, labels = torch.randn(16, *shape), torch.arange(16) % classes
    assert not list(model.buffers())
    logits = model(inputs)
    assert logits.shape == (16, classes)
    before = nn.functional.cross_entropy(logits, labels)
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.01)
    assert nn.functional.cross_entropy(model(inputs), labels) < before
