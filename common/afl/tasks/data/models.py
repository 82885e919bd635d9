"""The paper's models. Parameters keep torch's default initialization, drawn by whoever builds the model.

The paper names the architectures (appendix "Experimental Details") but not their widths, so widths are
parameters here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int, hidden: Sequence[int], classes: int) -> nn.Sequential:
    """A perceptron from ``[n, ...]``, flattened to ``[n, inputs]``, to logits ``[n, classes]``.

    Layer normalization and ReLU follow each layer of the widths ``hidden``. With two it is the paper's
    three-layer MLP for Fashion-MNIST.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise([inputs, *hidden]):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear([inputs, *hidden][-1], classes))


def cifar_cnn(channels: tuple[int, int] = (32, 64), classes: int = 10) -> nn.Sequential:
    """The paper's two-block CNN with a linear classifier, for CIFAR-10: input ``[n, 3, 32, 32]``.

    One block is a 3x3 convolution that keeps the size, ReLU, and 2x2 max pooling. No batch normalization:
    its statistics would have to be averaged apart from the parameters.
    """
    blocks = [*_block(3, channels[0], kernel=3), *_block(*channels, kernel=3)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels[1] * 8 * 8, classes))


def femnist_cnn(hidden: int = 2048, classes: int = 62, channels: tuple[int, int] = (32, 64)) -> nn.Sequential:
    """LEAF's two-layer CNN for FEMNIST: input ``[n, 1, 28, 28]``.

    Two 5x5 convolutions (LEAF: 32 and 64 channels) that keep the size, each with ReLU and 2x2 max pooling,
    then one hidden layer. LEAF's hidden layer of 2048 and 62 classes make 6,603,710 parameters.
    """
    blocks = [*_block(1, channels[0], kernel=5), *_block(*channels, kernel=5)]
    head = [nn.Flatten(), nn.Linear(channels[1] * 7 * 7, hidden), nn.ReLU(), nn.Linear(hidden, classes)]
    return nn.Sequential(*blocks, *head)


def _block(inputs: int, outputs: int, *, kernel: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.ReLU(), nn.MaxPool2d(2)]
