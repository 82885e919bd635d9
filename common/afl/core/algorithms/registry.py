"""The algorithms that are installed, by name: the built-in ones, and users' in the entry point group
``afl.algorithms``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from afl.core.algorithms.algorithm import KEYS, SHARED_OPTIONS, Algorithm
from afl.core.algorithms.builtin import BUILT_IN
from afl.core.algorithms.settings import AlgorithmSettings
from afl.core.randomness import SharedRandomness
from afl.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from afl.core.algorithms.base import ServerAlgorithm, WorkerSide

GROUP: Final = "afl.algorithms"

_BUILT_IN: Final = {algorithm.name: algorithm for algorithm in BUILT_IN}


def algorithm_names() -> tuple[str, ...]:
    """The names that are installed: the built-in ones, then the others, ascending. Nothing is loaded."""
    others = {point.name for point in entry_points(group=GROUP)} - _BUILT_IN.keys()
    return (*_BUILT_IN, *sorted(others))


def is_installed(name: str) -> bool:
    """Whether a name is one of :func:`algorithm_names`; fast for the built-in ones."""
    return name in _BUILT_IN or name in algorithm_names()


@cache
def algorithm_named(name: str) -> Algorithm:
    """The algorithm of a name; a user's own is loaded.

    Raises:
        ConfigError: if it is not installed, with the nearest name, or is no algorithm.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for point in entry_points(group=GROUP):
        if point.name == name:
            return _loaded(point)
    near = difflib.get_close_matches(name, algorithm_names(), n=1)
    raise ConfigError(
        f"the algorithm {name!r} is not installed here: no entry point of that name is in the group {GROUP}"
        + (f"; did you mean {near[0]!r}?" if near else "")
        + f" Installed: {', '.join(algorithm_names())}. Your own algorithm must be installed, as "
        "`pip install` does it, in the environment of the server and of every worker"
    )


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


def _loaded(point: EntryPoint) -> Algorithm:
    where = f"the entry point {point.name!r} of {GROUP}, {point.value},"
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{where} cannot be loaded: {error}") from error
    if isinstance(found, type) and issubclass(found, Algorithm):
        found = found()
    if not isinstance(found, Algorithm):
        raise ConfigError(f"{where} is no afl.Algorithm")
    if found.name != point.name:
        raise ConfigError(
            f"{where} is an algorithm that calls itself {found.name!r}; the names must be the same"
        )
    unknown = sorted(found.takes - SHARED_OPTIONS)
    if unknown:
        raise ConfigError(
            f"{where} takes {unknown[0]!r}, which is none of {', '.join(sorted(SHARED_OPTIONS))}; an option "
            "of its own belongs in `options`"
        )
    taken = sorted({option.name for option in found.options} & {*KEYS, "weigh_by_samples"})
    if taken:
        raise ConfigError(f"{where} calls an option of its own {taken[0]!r}, a name that is taken")
    return found
