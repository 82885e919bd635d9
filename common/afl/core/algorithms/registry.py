"""The algorithms that are installed, by name: the built-in ones, and users' in the entry point group
``afl.algorithms``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from afl.core.algorithms.algorithm import KEYS, SHARED_OPTIONS, Algorithm
from afl.core.algorithms.builtin import BUILT_IN
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.installed import Installed
from afl.core.randomness import SharedRandomness

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from afl.core.algorithms.base import ServerAlgorithm, WorkerSide


def _algorithm(found: object) -> Algorithm | None:
    if isinstance(found, type) and issubclass(found, Algorithm):
        found = found()
    return found if isinstance(found, Algorithm) else None


_ALGORITHMS: Final[Installed[Algorithm]] = Installed(
    "algorithm",
    "afl.algorithms",
    BUILT_IN,
    _algorithm,
    base="afl.Algorithm",
    shared=SHARED_OPTIONS,
    taken=KEYS | {"weigh_by_samples"},
    needed_by="the server and of every worker",
)

algorithm_names = _ALGORITHMS.names
is_installed = _ALGORITHMS.__contains__
algorithm_named = cache(_ALGORITHMS.named)


def users_of(option: str) -> list[str]:
    """The built-in algorithms that take one of the shared options."""
    return [algorithm.name for algorithm in BUILT_IN if option in algorithm.takes]


def server_half(settings: AlgorithmSettings, params: Tensor, randomness: SharedRandomness) -> ServerAlgorithm:
    """As :meth:`Algorithm.server`, of the settings' algorithm."""
    return algorithm_named(settings.name).server(settings, params, randomness)


def worker_side(
    settings: AlgorithmSettings,
    dim: int,
    randomness: SharedRandomness,
    workers: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    resends: bool = True,
    keeps_old: bool = False,
) -> WorkerSide:
    """As :meth:`Algorithm.worker`, of the settings' algorithm."""
    worker = algorithm_named(settings.name).worker
    return worker(settings, dim, randomness, workers, device, resends=resends, keeps_old=keeps_old)
