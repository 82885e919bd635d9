"""``algorithm.dual``: each rule takes its own options, and no other's; what workers are told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afl.config import Config, config_digest, config_from_mapping
from afl.core.algorithms.settings import DualChoice
from afl.errors import ConfigError, ProtocolError
from afl.wire.settings import RunSettings

SHARE = {"name": "fixed-share", "uniform": 0.1}
REGULARIZED = {"name": "kl-regularized", "temperature": 0.5}


def config(dual: Any, name: str = "afl-com", privacy: Any = None, **algorithm: Any) -> Config:
    return config_from_mapping(
        {
            "workers": 4,
            "task": {"name": "digits"},
            "algorithm": {"name": name, "rounds": 100, "eta_w": 0.5, "dual": dual, **algorithm},
            "privacy": privacy or {},
        }
    )


def hidden(dual: Any, **algorithm: Any) -> Config:
    privacy = {"secure_aggregation": True, "losses": "hidden"}
    return config(dual, privacy=privacy, uplink={"name": "identity", "bits": 16}, **algorithm)


@pytest.mark.parametrize(
    ("dual", "algorithm", "message"),
    [
        (
            REGULARIZED,
            {"eta_q": 0.1},
            r"algorithm\.eta_q(?s:.*)no eta_q; the dual rule kl-regularized does not use",
        ),
        (SHARE, {"eta_q": 0.1, "block": 9}, r"no block; the dual rule fixed-share does not use it"),
        (SHARE, {"eta_q": 0.1, "largest_weight": 0.5}, "no largest_weight; the dual rule fixed-share"),
        (
            {"name": "cvar", "share": 0.5},
            {"eta_q": 0.1, "largest_weight": 0.5},
            "no largest_weight; the dual",
        ),
        (SHARE, {}, r"algorithm\.eta_q(?s:.*)afl-com needs it"),
        ({"name": "kl-regularized"}, {}, r"dual\.temperature(?s:.*)nothing(?s:.*)kl-regularized needs it"),
        ({**REGULARIZED, "beta": 1}, {}, r"dual\.beta(?s:.*)a number from 0 to 0.999"),
        ({**REGULARIZED, "temprature": 1}, {}, r"dual\.temprature(?s:.*)nearest:   temperature"),
        ({"name": "projected", "uniform": 0.1}, {"eta_q": 0.1}, "only name with projected"),
        ({"name": "fixed_share"}, {"eta_q": 0.1}, r"dual\.name(?s:.*)nearest:   fixed-share"),
        (SHARE, {"eta_q": "theory", "sigma_q": 1.0}, "afl-br and afl-com, not dual.name: fixed-share"),
        (REGULARIZED, {"eta_w": "theory", "smoothness": 1.0}, "afl-com, not dual.name: kl-regularized"),
        (REGULARIZED, {"schedule": {"warm_up": 5, "eta_q": True}}, r"schedule\.eta_q(?s:.*)has no step size"),
        (SHARE, {"name": "sgda", "eta_q": 0.1}, "no dual; sgda does not use it"),
        (SHARE, {"name": "fedavg"}, "no dual; fedavg does not use it; it has no dual weights"),
        (3, {"eta_q": 0.1}, "a section with name and the rule's options"),
    ],
)
def test_what_a_rule_does_not_take_is_refused(dual: Any, algorithm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(dual, **algorithm)


def test_cvar_takes_the_theorems_step_sizes() -> None:
    assert config({"name": "cvar", "share": 0.5}, eta_q="theory", sigma_q=1.0).eta_q_value > 0


@pytest.mark.parametrize("dual", [REGULARIZED, {"name": "cvar", "share": 0.5}, {"name": "projected"}])
def test_hidden_losses_take_only_rules_that_a_worker_can_follow(dual: dict[str, Any]) -> None:
    eta_q = {} if dual is REGULARIZED else {"eta_q": 0.1}
    with pytest.raises(
        ConfigError, match=r"dual\.name(?s:.*)one of kl-restarts and fixed-share; with losses"
    ):
        hidden(dual, **eta_q)


def test_the_digest_tells_rules_apart_and_the_default_not() -> None:
    plain = config_digest(config(None, eta_q=0.1))
    assert config_digest(config({}, eta_q=0.1)) == plain
    assert config_digest(config({"name": "kl-restarts"}, eta_q=0.1)) == plain
    assert config_digest(config({**REGULARIZED, "beta": 0.9})) == config_digest(config(REGULARIZED))
    others = [config(SHARE, eta_q=0.1), config(REGULARIZED), config({**REGULARIZED, "beta": 0.5})]
    assert len({plain, *map(config_digest, others)}) == 4


def test_workers_are_told_of_a_rule_only_where_they_follow_it() -> None:
    """So that workers of an older version can take part where they need not know it."""
    for made in (config(SHARE, eta_q=0.1), config(REGULARIZED)):
        told = RunSettings.of_config(made).to_message()
        assert "dual" not in json.loads(told.algorithm_options)
        assert RunSettings.of_message(told).parameters.dual == DualChoice()
    settings = RunSettings.of_config(hidden(SHARE, eta_q=0.1))
    assert RunSettings.of_message(settings.to_message()) == settings
    assert settings.parameters.dual == DualChoice("fixed-share", {"uniform": 0.1})
    assert "dual" not in json.loads(
        RunSettings.of_config(hidden(None, eta_q=0.1)).to_message().algorithm_options
    )


@pytest.mark.parametrize(
    "dual",
    [
        3,
        {"name": "fixed-share"},
        {"name": "fixed-share", "options": {}},
        {"name": "fixed-share", "options": {"uniform": "x"}},
        {"name": "fixed-share", "options": {"uniform": 2}},
        {"name": ["fixed-share"], "options": {"uniform": 0.1}},
        {"name": "none", "options": {}},
    ],
)
def test_a_server_that_names_no_rule_is_refused(dual: Any) -> None:
    told = RunSettings.of_config(hidden(SHARE, eta_q=0.1)).to_message()
    told.algorithm_options = json.dumps({**json.loads(told.algorithm_options), "dual": dual})
    with pytest.raises(ProtocolError, match=r"dual is .*, not a dual rule with its options"):
        RunSettings.of_message(told)
