"""What ``afl theory`` is asked: a run and a problem, from its options or from a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afl.config import Config, check_compressor, load_config
from afl.config.compressors import IDENTITY, resolved_options
from afl.core.algorithms.registry import algorithm_named
from afl.errors import AflError, ConfigError
from afl.theory import Theorem, block_length, covering, theory_ratio

_GIVEN_BY_CONFIG = {
    "workers": "workers",
    "rounds": "algorithm.rounds",
    "compressor": "algorithm.uplink.name",
    "ratio": "algorithm.uplink.ratio",
}
"""Options, and the key that says the same in a configuration."""


@dataclass(frozen=True)
class Compression:
    """The compressors of a run, and the theorem that speaks of them.

    Attributes:
        description: in words.
        ratio_that_keeps_the_rate: the uplink's, by the theorem that speaks of the pair.
    """

    description: str
    theorem: Theorem
    delta: float
    ratio_that_keeps_the_rate: float


@dataclass(frozen=True)
class Question:
    """A run's size and a problem's constants; ``None`` is what is not known.

    Attributes:
        compression: ``None`` where it needs the dimension, which is not known.
        warnings: what the answer should say first.
    """

    workers: int
    rounds: int
    dim: int | None
    compression: Compression | None
    smoothness: float | None
    sigma_q: float | None
    gradient_bound: float | None
    sigma_w: float | None
    delta_phi: float | None
    epsilon: float
    warnings: tuple[str, ...] = ()


def read_question(options: argparse.Namespace) -> Question:
    """The question that the command line asks.

    Raises:
        ConfigError: if something needed is missing, given twice, or wrong.
    """
    if options.config is not None:
        return _from_config(options)
    for name in ("workers", "rounds"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name} is missing; give it, or --config with a server's configuration")
    if options.set:
        raise ConfigError(
            f"--set {options.set[0]} overrides a configuration, and there is none: add --config"
        )
    if options.compressor is None and options.ratio is not None:
        raise ConfigError("--ratio needs --compressor, such as --compressor rand-k")
    name = options.compressor or "identity"
    chosen = {} if options.ratio is None else {"ratio": options.ratio}
    if name != "identity" and options.dim is None:
        raise ConfigError(f"--compressor {name} needs --dim: its contraction delta depends on the dimension")
    return Question(
        workers=options.workers,
        rounds=options.rounds,
        dim=options.dim,
        compression=_compression((name, chosen), (name, chosen), options.dim, options.workers),
        smoothness=options.smoothness,
        sigma_q=options.sigma_q,
        gradient_bound=options.gradient_bound,
        sigma_w=options.sigma_w,
        delta_phi=options.delta_phi,
        epsilon=options.epsilon,
    )


def _from_config(options: argparse.Namespace) -> Question:
    for option, key in _GIVEN_BY_CONFIG.items():
        if getattr(options, option) is not None:
            raise ConfigError(f"--{option} and --config both say it; use --set {key}=... instead")
    config = load_config(options.config, options.set)
    algorithm = config.algorithm
    constants = {}
    for name in ("smoothness", "sigma_q"):
        given, written = getattr(options, name), getattr(algorithm, name)
        if given is not None and written is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is also algorithm.{name} of {options.config}; leave out --{flag}")
        constants[name] = written if given is None else given
    dim, warnings = options.dim, list(_warnings(config))
    if dim is None:
        dim, problem = _model_size(config)
        warnings += [problem] if problem else []
    up, down = algorithm.uplink_compressor, algorithm.downlink_compressor
    return Question(
        workers=config.workers,
        rounds=algorithm.rounds,
        dim=dim,
        compression=_compression((up.name, up.options), (down.name, down.options), dim, config.workers),
        smoothness=constants["smoothness"],
        sigma_q=constants["sigma_q"],
        gradient_bound=options.gradient_bound,
        sigma_w=options.sigma_w,
        delta_phi=options.delta_phi,
        epsilon=options.epsilon,
        warnings=tuple(warnings),
    )


def _warnings(config: Config) -> list[str]:
    """Where the configuration is not the run that the theorems speak of."""
    algorithm = config.algorithm
    if not algorithm_named(algorithm.name).has_theorems:
        return [
            f"the configuration runs {algorithm.name}; what follows is said of afl-br and afl-com, not of it"
        ]
    own = [f"eta_w = {algorithm.eta_w}"] if algorithm.eta_w != "theory" else []
    own += [f"eta_q = {algorithm.eta_q}"] if algorithm.eta_q != "theory" else []
    if algorithm.block_length != block_length(algorithm.rounds):
        own.append(f"block = {algorithm.block_length}")
    if not own:
        return []
    return [f"the configuration sets {', '.join(own)}; the theorems speak of the values below alone"]


def _model_size(config: Config) -> tuple[int | None, str | None]:
    """d of the configuration's task, or why it is not known. Code is loaded from installed tasks only."""
    from afl.core.randomness import SharedRandomness  # noqa: PLC0415
    from afl.tasks.initialization import build_vector  # noqa: PLC0415  # with torch, which takes seconds
    from afl.tasks.registry import known_tasks, load_task  # noqa: PLC0415

    name = config.task.name
    if name not in known_tasks():
        return None, f"the task {name} is not an installed one, so the model's size is not known; give --dim"
    try:
        return build_vector(load_task(name, config.task.options), SharedRandomness.from_int(0)).dim, None
    except AflError as error:
        return None, f"the model of the task {name} cannot be made here ({error}); give --dim"


def _compression(
    uplink: tuple[str, Mapping[str, Any]],
    downlink: tuple[str, Mapping[str, Any]],
    dim: int | None,
    workers: int,
) -> Compression | None:
    if uplink[0] == downlink[0] == "identity":
        return Compression("none: whole vectors", Theorem.AFL_BR, 1.0, 1.0)
    if dim is None:
        return None
    from afl.core.compressors import Compressor, compressor_class, create  # noqa: PLC0415  # with torch

    same = uplink == downlink
    is_exact_down = same or downlink[0] == IDENTITY

    def made(name: str, options: Mapping[str, Any]) -> Compressor:
        compressor_class(name)  # an unknown name is refused by the registry
        check_compressor(name, options)
        options = resolved_options(name, options, workers=workers, is_exact_down=is_exact_down)
        return create(name, dim, options)

    up, down = made(*uplink), made(*downlink)
    is_sharper = is_exact_down and up.additive_idempotent
    keeps_rate = theory_ratio("additive-idempotent" if is_sharper else "contractive", workers)
    theorem, delta = covering(
        up.delta,
        down.delta,
        downlink_loses=not (down.lossless or (same and up.additive_idempotent)),
    )
    described = f"{_described(*uplink)} both ways"
    if not same:
        described = f"{_described(*uplink)} up, {_described(*downlink)} down"
    return Compression(described, theorem, delta, keeps_rate)


def _described(name: str, options: Mapping[str, Any]) -> str:
    return name + (f" ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else "")
