"""Which settings are searched, between which values, and what a trial's values are in a configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from afl.config import Config
from afl.config.compressors import BITS_TAKERS
from afl.core.algorithms.registry import algorithm_named
from afl.core.dual import rule_named
from afl.core.messages import BITS
from afl.core.rounds.phases import unaliased_spacing
from afl.errors import ConfigError

HELD_OUT_SHARE: Final = 0.2
"""Where a configuration holds nothing out."""

FEWEST_EVALUATIONS: Final = 20
"""Of a trial: those at its end are averaged, and by then a cosine's steps must be small."""

FLOAT_BITS: Final = 32

DECAY: Final = 0.01
"""The weight decay around which is searched, of a configuration that has none."""

_DUAL: Final = "dual."
"""Before the name of an option of the dual rule."""

Params: TypeAlias = Mapping[str, Any]
"""A trial's values, by the names of :func:`space_of`; empty for the configuration itself."""


def fixed_overrides(config: Config) -> list[str]:
    """What all trials set, as ``--set`` has it: records held out, and step sizes that are numbers.

    Raises:
        ConfigError: if the configuration cannot be tuned.
    """
    own = config.algorithm
    if config.privacy.losses == "hidden":
        told = "privacy.losses is hidden, and trials are judged by each worker's own value"
        raise ConfigError(f"{told}; tune with --set privacy.losses=shown, and hide them in the run itself")
    if own.uplink_compressor.options.get("ratio") == "theory":
        raise ConfigError("algorithm.uplink.ratio is theory; tune with a number, such as afl theory gives")
    given = [] if config.task.held_out else [f"task.held_out={HELD_OUT_SHARE}"]
    given += [f"algorithm.eta_w={own.eta_w_value!r}", "algorithm.smoothness=null"]
    if own.takes("eta_q"):
        given += [f"algorithm.eta_q={config.eta_q_value!r}", "algorithm.sigma_q=null"]
    # A number, up to which each trial's own is: trials are compared about every so many rounds.
    if config.evaluation.every == "auto" or own.rounds < FEWEST_EVALUATIONS * config.evaluation.every:
        given.append(f"evaluation.every={max(1, own.rounds // FEWEST_EVALUATIONS)}")
    return given


def space_of(config: Config) -> dict[str, BaseDistribution]:
    """What is searched, around a configuration's own values.

    A round of a trial sends about as many bytes as the configuration's: with fewer bits go more values.
    """
    own = config.algorithm
    space: dict[str, BaseDistribution] = {"eta_w": _around(own.eta_w_value, 1 / 10, 3)}
    if own.takes("eta_q"):
        space["eta_q"] = _around(config.eta_q_value or 0.1, 1 / 10, 10)
    if own.takes("block"):
        block = math.isqrt(own.rounds)
        least, most = (
            min(max(2, block // 4), own.block_length),
            max(min(own.rounds, 10 * block), own.block_length),
        )
        space["block"] = IntDistribution(least, most, log=True)
    for option in rule_named(own.dual_choice.name).options:
        value = own.dual_choice.options[option.name]
        if option.kind == "number" and value > 0:
            least, most = max(value / 10, option.least), min(value * 10, option.most)
            space[f"{_DUAL}{option.name}"] = FloatDistribution(least, most, log=True)
    if own.takes("dual_loss"):
        space["dual_loss"] = CategoricalDistribution(["training", "held-out"])
    if own.takes("uplink") and _takes_bits(config):
        space["bits"] = CategoricalDistribution(sorted({4, 6, 8, 12, _bits(config)}))
    if own.takes("weight_decay"):
        space["weight_decay"] = _around(own.weight_decay or DECAY, 1 / 3, 3)
    return space


def own_params(config: Config) -> dict[str, Any]:
    """The configuration's own values, with weight decay in any case."""
    own = config.algorithm
    values = {
        "eta_w": own.eta_w_value,
        "eta_q": config.eta_q_value or 0.1,
        "block": own.block_length,
        "dual_loss": own.dual_loss or "training",
        "bits": _bits(config),
        **{_DUAL + name: value for name, value in own.dual_choice.options.items()},
        "weight_decay": own.weight_decay or DECAY,
    }
    return {name: values[name] for name in space_of(config)}


def first_params(config: Config) -> list[dict[str, Any]]:
    """The first trials: the configuration itself, and its values as the trials after it are, also with dual
    weights that follow the losses twice and half as fast."""
    own = own_params(config)
    if "eta_q" not in own:
        return [{}, own]
    return [{}, *({**own, "eta_q": factor * own["eta_q"]} for factor in (1, 2, 0.5))]


def overrides_of(config: Config, params: Params) -> list[str]:
    """A trial's values as ``--set`` has them; what depends on the number of bits goes with it.

    All but the configuration itself have a schedule: with constant steps the round at which to stop would be
    one more choice, and of many rounds the one is taken at which few held-out records had luck.
    """
    if not params:
        return []
    plain = {name: _short(value) for name, value in params.items() if name != "bits"}
    given = [f"algorithm.{name}={json.dumps(value)}" for name, value in plain.items()]
    if config.algorithm.takes("schedule") and config.algorithm.schedule is None:
        given.append("algorithm.schedule.then=cosine")
    if "bits" in params:
        up, bits = config.algorithm.uplink_compressor, params["bits"]
        options: dict[str, Any] = {"name": up.name, **up.options}
        options["ratio"] = _short(min(1.0, options["ratio"] * _bits(config) / bits))
        options |= {} if bits == FLOAT_BITS else {BITS: bits}
        ways = ["uplink"] if config.algorithm.downlink is None else ["uplink", "downlink"]
        given += [f"algorithm.{way}={json.dumps(options)}" for way in ways]
    return given


def unaliased(config: Config) -> Config:
    """With evaluations no rarer, of which those at a trial's end see several places of a block: its own B may
    divide the number of rounds between them, or be next to it."""
    algorithm = config.algorithm
    every = unaliased_spacing(config.evaluate_every, algorithm.rounds, algorithm.restart_length)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": every})})


def can_be_cut(config: Config) -> bool:
    """Whether a run's first rounds are those of a shorter run: neither its step sizes nor the model that it
    ends with look at its length."""
    return (
        getattr(config.algorithm, "schedule", None) is None
        and config.algorithm.final_model != "block-mean"
        and not algorithm_named(config.algorithm.name).options
    )


def _short(value: Any) -> Any:
    """A number that a person can read; the rest of its digits means nothing."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _around(value: float, least: float, most: float) -> FloatDistribution:
    return FloatDistribution(value * least, value * most, log=True)


def _takes_bits(config: Config) -> bool:
    up, down = config.algorithm.uplink_compressor, config.algorithm.downlink_compressor
    return up.name in BITS_TAKERS and up == down and "ratio" in up.options


def _bits(config: Config) -> int:
    bits: Any = config.algorithm.uplink_compressor.options.get(BITS, FLOAT_BITS)
    return int(bits)
