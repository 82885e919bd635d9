"""Keys of schedules, optimizers, weight decay and clipping: what is refused, and what defines a run."""

from __future__ import annotations

from typing import Any

import pytest

from afl.config import (
    Config,
    InvalidConfigError,
    config_digest,
    config_from_mapping,
    config_from_text,
    dump_config,
)
from afl.config.compare import differences


def config(**algorithm: Any) -> Config:
    return config_from_mapping(
        {
            "workers": 3,
            "task": {"name": "synthetic"},
            "algorithm": {"name": "afl-com", "rounds": 100, "eta_w": 0.1, "eta_q": 0.1, **algorithm},
            "run": {"seed": 1},
        }
    )


FULL = {
    "schedule": {"warm_up": 5, "then": "steps", "at": [20, 40]},
    "optimizer": {"name": "adam", "beta_1": 0.8},
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "final_model": "block-mean",
}


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"schedule": {"then": "cosin"}}, "schedule.then", "constant, cosine or steps"),
        ({"schedule": {"warm_up": 100}}, "schedule.warm_up", "less than algorithm.rounds (100)"),
        ({"schedule": {"then": "steps"}}, "schedule.at", "then: steps needs it"),
        ({"schedule": {"then": "steps", "at": [30, 20]}}, "schedule.at", "ascending"),
        (
            {"schedule": {"warm_up": 9, "then": "steps", "at": [5]}},
            "schedule.at",
            "none of them in the warm-up",
        ),
        ({"schedule": {"then": "steps", "at": [5], "factor": 0}}, "schedule.factor", "from 0.001 to 1"),
        ({"schedule": {"final": 0.1}}, "schedule.final", "only then: cosine uses it"),
        ({"schedule": {"then": "cosine", "at": [5]}}, "schedule.at", "only then: steps uses it"),
        ({"optimizer": {"name": "adamw"}}, "optimizer.name", "sgd, momentum or adam"),
        ({"optimizer": {"beta_1": 0.9}}, "optimizer.beta_1", "only name: momentum and adam use it"),
        ({"optimizer": {"name": "momentum", "beta_2": 0.9}}, "optimizer.beta_2", "only name: adam uses it"),
        ({"optimizer": {"name": "momentum", "beta_1": 1.0}}, "optimizer.beta_1", "from 0, below 1"),
        ({"optimizer": {"name": "adam", "epsilon": 1e-21}}, "optimizer.epsilon", "from 1e-20 to 1"),
        ({"final_model": "mean"}, "final_model", "last or block-mean"),
        ({"name": "sgda", "final_model": "block-mean"}, "final_model", "sgda does not use it"),
        ({"clip_norm": 0}, "clip_norm", "a number above 0"),
        ({"weight_decay": -1}, "weight_decay", "a number above 0"),
        (
            {"name": "drfa", "optimizer": {"name": "adam"}},
            "optimizer",
            "since its workers take local steps of SGD; afl-br, afl-com, sgda and fedavg do",
        ),
        (
            {"name": "fedavg", "eta_q": None, "optimizer": {"name": "adam"}},
            "server_eta",
            "a step size of the server, about how far a parameter moves in a round, such as 0.01",
        ),
        ({"server_eta": 0.1}, "server_eta", "no server_eta; afl-com does not use it"),
        ({"name": "fedavg", "eta_q": None, "server_eta": 0}, "server_eta", "a number above 0"),
    ],
)
def test_a_mistake_is_refused_with_what_would_be_right(options: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        config(**options)
    text = " ".join(str(caught.value).split())
    assert f"algorithm.{key} " in text
    assert words in text


def test_what_changes_nothing_has_the_digest_of_the_run_without_it() -> None:
    plain = config_digest(config())
    assert config_digest(config(schedule={}, optimizer={"name": "sgd"}, final_model="last")) == plain
    digests = {config_digest(config(**{key: value})) for key, value in FULL.items()}
    assert len({plain, *digests}) == 1 + len(FULL)
    written = {"name": "momentum", "beta_1": 0.9}
    assert config_digest(config(optimizer={"name": "momentum"})) == config_digest(config(optimizer=written))


def test_it_comes_back_from_its_file_and_is_another_run() -> None:
    full = config(**FULL)
    assert config_from_text(dump_config(full), "again") == full
    assert differences(full, full) == []
    assert any(line.startswith("algorithm.clip_norm") for line in differences(config(), full))
    assert full.algorithm.stepping == {
        "schedule": {"warm_up": 5, "then": "steps", "at": (20, 40), "factor": 0.1, "eta_q": False},
        "optimizer": {"name": "adam", "beta_1": 0.8, "beta_2": 0.999, "epsilon": 1e-8},
        "weight_decay": 0.1,
        "clip_norm": 1.0,
    }
