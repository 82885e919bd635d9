"""The initial model follows from the seed, and drawing it disturbs nobody."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import core_philox as reference
import pytest
import torch
from torch import Tensor, nn

from afl.core.algorithms.afl_com import Realizations
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.arithmetic import arithmetic
from afl.core.randomness import SharedRandomness
from afl.errors import TaskError
from afl.tasks.base import Task, TaskContext, WorkerData
from afl.tasks.initialization import build_vector, realization_digest


class Small(Task):
    """A model whose constructor draws from torch's global generator, as most do."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def data(self, worker: int, context: TaskContext) -> WorkerData:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError


class Normalized(Small):
    buffers = "local"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


class Wrong(Small):
    def model(self) -> nn.Module:
        return {"weight": 1}  # type: ignore[return-value]


def test_the_seed_alone_decides_the_initial_model() -> None:
    def built(seed: int) -> bytes:
        return build_vector(Small(), SharedRandomness.from_int(seed)).digest()

    torch.manual_seed(1)
    first = built(5)
    torch.manual_seed(2)
    assert built(5) == first
    assert built(6) != first


def test_torch_is_seeded_with_the_first_word_of_its_own_stream() -> None:
    torch.manual_seed(next(reference.words(5, 5, 0, 0)) >> 1)
    right = torch.cat([parameter.detach().reshape(-1) for parameter in Small().model().parameters()])
    assert torch.equal(build_vector(Small(), SharedRandomness.from_int(5)).values, right)


def test_torch_s_own_generator_goes_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(11)
    right = torch.rand(3)
    torch.manual_seed(11)
    build_vector(Small(), SharedRandomness.from_int(5))
    assert torch.equal(torch.rand(3), right)


def test_running_statistics_are_allowed_where_the_task_says_local() -> None:
    assert build_vector(Normalized(), SharedRandomness.from_int(5)).dim == 16 + 8
    Normalized.buffers = "refuse"
    try:
        with pytest.raises(TaskError, match="BatchNorm1d"):
            build_vector(Normalized(), SharedRandomness.from_int(5))
    finally:
        Normalized.buffers = "local"


def test_the_task_s_policy_is_the_vector_s_and_an_unknown_one_is_refused() -> None:
    for policy, size in (("local", 0), ("mean", 8)):
        task = type("Named", (Normalized,), {"buffers": policy})()
        assert build_vector(task, SharedRandomness.from_int(5)).buffers.size == size
    task = type("Named", (Normalized,), {"buffers": "average"})()
    with pytest.raises(
        TaskError, match=r"Named\.buffers is 'average'; it must be one of 'refuse', 'local', 'mean'"
    ):
        build_vector(task, SharedRandomness.from_int(5))


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(TaskError, match=r"Wrong\.model\(\) returned dict; it must return an nn\.Module"):
        build_vector(Wrong(), SharedRandomness.from_int(5))


def digest(seed: int, up: CompressorChoice, down: CompressorChoice, dim: int = 50, rounds: int = 10) -> bytes:
    settings = settings_of(up, down, rounds)
    return realization_digest(Realizations(settings, dim, SharedRandomness.from_int(seed)), settings, dim)


def settings_of(up: CompressorChoice, down: CompressorChoice, rounds: int = 10) -> AlgorithmSettings:
    return AlgorithmSettings(3, rounds, 4, 0.1, 0.1, up, down)


def test_the_realization_digest_by_hand() -> None:
    words = reference.words(9, 1, 1, 0)
    start = struct.pack("<4Q", *(next(words) for _ in range(4)))
    support = reference.subset(reference.words(9, 1, 1, 0), 50, 10)
    drawn = struct.pack("<10q", *support)
    choice, other = CompressorChoice("rand-k", {"ratio": 0.2}), CompressorChoice("top-k", {"ratio": 0.2})
    for down, material in ((choice, start + drawn + drawn), (other, start + drawn)):
        right = hashlib.blake2b(material + arithmetic(settings_of(choice, down), 50), digest_size=16).digest()
        assert digest(9, choice, down) == right


def test_the_realization_digest_differs_with_seed_support_and_direction() -> None:
    few, many = CompressorChoice("rand-k", {"ratio": 0.2}), CompressorChoice("rand-k", {"ratio": 0.4})
    identity = CompressorChoice()
    found = [
        digest(9, few, few),
        digest(10, few, few),
        digest(9, many, many),
        digest(9, few, many),
        digest(9, many, few),
        digest(9, few, few, dim=51),
        digest(9, identity, identity),
        digest(10, identity, identity),
    ]
    assert len(set(found)) == len(found)
    # Nothing but what both ends draw and compute enters it.
    assert digest(9, few, few, rounds=99) == found[0]
