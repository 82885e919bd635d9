"""Each algorithm takes its own options, and no other's."""

from __future__ import annotations

from typing import Any

import pytest

from afl.config import config_digest, config_from_mapping
from afl.config.schema import Algorithm
from afl.core.algorithms.algorithm import KEYS, SHARED_OPTIONS
from afl.core.algorithms.registry import algorithm_named, algorithm_names
from afl.core.options import AlgorithmOption
from afl.errors import ConfigError
from afl.wire.settings import RunSettings


def example_of(option: AlgorithmOption) -> float | bool | str:
    """A value that an algorithm's own option may have."""
    examples = (*option.choices, option.least, option.most, 1, True, "text")
    return next(value for value in examples if option.takes(value))


NEEDED: dict[str, dict[str, Any]] = {
    name: {option.name: example_of(option) for option in about.options if option.default is None}
    | ({"eta_q": 0.1} if "eta_q" in about.takes else {})
    for name, about in ((name, algorithm_named(name)) for name in algorithm_names())
}
"""What each installed algorithm cannot do without."""

EXAMPLES: dict[str, Any] = {
    "block": 7,
    "eta_q": 0.2,
    "uplink": {"name": "rand-k", "ratio": 0.5},
    "downlink": {"name": "top-k", "ratio": 0.5},
    "local_steps": 3,
    "sampled": 2,
    "weighting": "samples",
    "largest_weight": 0.5,
    "schedule": {"warm_up": 10, "then": "steps", "at": [50], "factor": 0.5, "eta_q": True},
    "optimizer": {"name": "momentum", "beta_1": 0.8},
    "weight_decay": 0.01,
    "server_eta": 0.5,
    "final_model": "block-mean",
    "dual": {"name": "kl-restarts"},
    "dual_loss": "training",
}


def config(name: str, **options: Any) -> Any:
    algorithm = {"name": name, "rounds": 100, "eta_w": 0.5, **NEEDED[name], **options}
    return config_from_mapping({"workers": 4, "task": {"name": "digits"}, "algorithm": algorithm})


def test_the_rules_speak_of_all_algorithms_and_options() -> None:
    assert algorithm_names()[:5] == ("afl-br", "afl-com", "sgda", "drfa", "fedavg")
    assert frozenset().union(*(algorithm_named(name).takes for name in NEEDED)) == EXAMPLES.keys()
    assert EXAMPLES.keys() == SHARED_OPTIONS
    assert Algorithm.model_fields.keys() == KEYS


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("option", EXAMPLES)
def test_an_option_is_used_or_refused(name: str, option: str) -> None:
    if option in algorithm_named(name).takes:
        config(name, **{option: EXAMPLES[option]})
        return
    with pytest.raises(ConfigError, match=rf"algorithm\.{option}(?s:.*)no {option}; {name} does not"):
        config(name, **{option: EXAMPLES[option]})


def test_held_out_dual_losses_need_something_held_out() -> None:
    with pytest.raises(ConfigError, match=r"task\.held_out(?s:.*)algorithm.dual_loss: held-out needs it"):
        config("afl-com", dual_loss="held-out")


@pytest.mark.parametrize("name", ["afl-br", "afl-com", "sgda", "drfa"])
def test_a_dual_step_size_is_required(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.eta_q(?s:.*){name} needs it"):
        config(name, eta_q=None)


@pytest.mark.parametrize("name", ["sgda", "drfa", "fedavg"])
def test_the_theory_sets_no_step_size_of_others(name: str) -> None:
    with pytest.raises(ConfigError, match="the theorems set step sizes for afl-br and afl-com"):
        config(name, eta_w="theory", smoothness=2.0)


@pytest.mark.parametrize("sampled", [5, 100])
def test_no_more_workers_are_sampled_than_there_are(sampled: int) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.sampled(?s:.*)at most workers \(4\)"):
        config("drfa", sampled=sampled)
    assert config("drfa", sampled=4).algorithm.sampled == 4


@pytest.mark.parametrize(
    ("name", "options", "right"),
    [
        ("fedavg", {}, (1, None, False)),
        ("fedavg", {"local_steps": 3, "weighting": "samples"}, (3, None, True)),
        ("fedavg", {"weighting": "uniform"}, (1, None, False)),
        ("drfa", {"local_steps": 5, "sampled": 2}, (5, 2, False)),
        ("sgda", {}, (1, None, False)),
    ],
)
def test_what_the_state_machines_get(name: str, options: dict[str, Any], right: tuple[Any, ...]) -> None:
    parameters = RunSettings.of_config(config(name, **options)).parameters
    assert (parameters.local_steps, parameters.sampled, parameters.weigh_by_samples) == right
    assert parameters.name == name


@pytest.mark.parametrize("name", NEEDED)
def test_every_algorithm_s_gradients_can_be_batched(name: str) -> None:
    values = {
        "workers": 4,
        "task": {"name": "digits"},
        "algorithm": {"name": name, "rounds": 100, "eta_w": 0.5, **NEEDED[name]},
        "worker": {"batch_oracles": True},
    }
    assert RunSettings.of_config(config_from_mapping(values)).batch_oracles


def test_synchronizations_cover_all_update_rounds() -> None:
    parameters = RunSettings.of_config(config("drfa", local_steps=3)).parameters
    assert parameters.synchronizations == 34
    covered = [round_ for s in range(1, 35) for round_ in parameters.updates_of(s)]
    assert covered == list(range(1, 101))
    assert len(parameters.updates_of(34)) == 1
    assert [parameters.named(s) for s in (0, 1, 33, 34, 35)] == [
        "before its first round",
        "rounds 1-3",
        "rounds 97-99",
        "round 100",
        "after its last round",
    ]


def test_the_digest_tells_options_apart_and_defaults_not() -> None:
    plain = config_digest(config("fedavg"))
    assert config_digest(config("fedavg", local_steps=1, weighting="uniform")) == plain
    assert config_digest(config("fedavg", server_eta=1)) == plain
    others = [config("fedavg", local_steps=2), config("fedavg", weighting="samples")]
    others += [config("fedavg", server_eta=0.5), config("fedavg", optimizer={"name": "momentum"})]
    assert len({plain, *map(config_digest, others)}) == 5
    capped = config("afl-br", largest_weight=0.5)
    assert config_digest(capped) != config_digest(config("afl-br"))


@pytest.mark.parametrize("largest", [0.25, 0.1, 0.0, 1.5, True])
def test_weights_that_sum_to_1_are_not_all_below_1_in_m(largest: Any) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.largest_weight"):
        config("afl-com", largest_weight=largest)
    assert config("afl-com", largest_weight=0.26).algorithm.largest_weight == 0.26
    assert config("afl-com", largest_weight=1).algorithm.largest_weight == 1


@pytest.mark.parametrize(
    ("changes", "accepted"),
    [
        ({"algorithm": {"name": "fedavg", "eta_q": None}}, "no loss_cap; fedavg has no dual weights"),
        (
            {
                "algorithm": {"name": "afl-com", "uplink": {"name": "rand-k", "ratio": 0.1, "bits": 16}},
                "privacy": {"secure_aggregation": True, "losses": "hidden"},
            },
            "no loss_cap; with losses: hidden the server sees no loss of its own",
        ),
        ({"faults": {"loss_cap": 0}}, "loss_cap"),
    ],
)
def test_losses_are_capped_where_the_server_has_a_use_for_them(
    changes: dict[str, Any], accepted: str
) -> None:
    values: dict[str, Any] = {
        "workers": 4,
        "task": {"name": "digits"},
        "faults": {"loss_cap": 30},
        **changes,
        "algorithm": {"name": "afl-br", "rounds": 9, "eta_w": 0.5, "eta_q": 0.1}
        | changes.get("algorithm", {}),
    }
    with pytest.raises(ConfigError, match=accepted):
        config_from_mapping(values)
