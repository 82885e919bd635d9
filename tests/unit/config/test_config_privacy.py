"""What a run with secure aggregation needs besides."""

from __future__ import annotations

from typing import Any

import pytest

from afl.config import config_from_mapping
from afl.errors import ConfigError

RAND_K = {"name": "rand-k", "ratio": 0.1, "bits": 16}


def config(**changes: Any) -> dict[str, Any]:
    algorithm = {"name": "afl-com", "rounds": 10, "eta_w": 0.1, "eta_q": 0.1, "uplink": RAND_K}
    return {
        "workers": 10,
        "task": {"name": "synthetic"},
        "privacy": {"secure_aggregation": True},
        **changes,
        "algorithm": {**algorithm, **changes.get("algorithm", {})},
    }


@pytest.mark.parametrize(
    ("changes", "key", "accepted"),
    [
        ({"privacy": {"losses": "hidden"}}, "privacy.secure_aggregation", "true; losses: hidden needs masks"),
        (
            {"algorithm": {"uplink": {"name": "rand-k", "ratio": 0.1}}},
            "algorithm.uplink.bits",
            "16, say: masks are added to integers",
        ),
        ({"algorithm": {"uplink": {**RAND_K, "bits": 4}}}, "algorithm.uplink.bits", "at least 5, better 16"),
        (
            {
                "privacy": {"secure_aggregation": True, "losses": "hidden"},
                "algorithm": {"largest_weight": 0.5},
            },
            "algorithm.largest_weight",
            "no largest_weight; with losses: hidden nobody knows all dual weights",
        ),
        ({"workers": 1}, "workers", "at least 2: a sum of one hides nothing"),
        (
            {"faults": {"stragglers": {"policy": "skip", "deadline": "5s"}}},
            "faults.stragglers.policy",
            "wait; with secure_aggregation a sum can be read only when nobody is missing",
        ),
        ({"faults": {"non_finite": "skip"}}, "faults.non_finite", "abort; with secure_aggregation a sum"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], key: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(config(**changes))
    assert f"{key}\n" in str(caught.value)
    assert accepted in str(caught.value)


@pytest.mark.parametrize("name", ["afl-br", "sgda", "drfa", "fedavg"])
def test_algorithms_without_integers_are_refused(name: str) -> None:
    own = {"name": name, "rounds": 10, "eta_w": 0.1, **({} if name == "fedavg" else {"eta_q": 0.1})}
    values = config()
    with pytest.raises(ConfigError, match=f"false; masks are added to integers, which {name} does not send"):
        config_from_mapping({**values, "algorithm": own})


def test_the_fewest_bits_hold_the_sum_of_all() -> None:
    for workers, bits in ((3, 3), (10, 5), (16, 6), (100, 8)):
        uplink = {**RAND_K, "bits": bits}
        config_from_mapping(config(workers=workers, algorithm={"uplink": uplink}))
        with pytest.raises(ConfigError, match=f"at least {bits}, better 16"):
            config_from_mapping(config(workers=workers, algorithm={"uplink": {**uplink, "bits": bits - 1}}))
