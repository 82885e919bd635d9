"""What an installed algorithm must be, and what its options take."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from afl.core import installed as installing
from afl.core.algorithms import registry
from afl.core.algorithms.algorithm import Algorithm
from afl.core.algorithms.builtin import BUILT_IN
from afl.core.options import AlgorithmOption
from afl.errors import ConfigError


class Right(Algorithm):
    name = "mine"
    description = "an algorithm of one's own"
    takes = frozenset({"eta_q"})
    options = (AlgorithmOption("share", "a share", least=0.0, most=1.0),)

    def server(self, settings: Any, params: Any, randomness: Any) -> Any:
        raise NotImplementedError


class Renamed(Right):
    name = "other"


class Greedy(Right):
    takes = frozenset({"eta_q", "etaq"})


class Shadowing(Right):
    options = (AlgorithmOption("rounds", "how many", "count"),)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs an attribute of this module under the name ``mine``."""

    def installed(attribute: str) -> None:
        group_ = "afl.algorithms"
        point = EntryPoint("mine", f"{__name__}:{attribute}", group_)
        monkeypatch.setattr(installing, "entry_points", lambda group: [point] if group == group_ else [])
        registry.algorithm_named.cache_clear()

    yield installed
    registry.algorithm_named.cache_clear()


def test_an_installed_algorithm_is_found_behind_the_built_in_ones(install: Any) -> None:
    install("Right")
    assert registry.algorithm_names() == (*(algorithm.name for algorithm in BUILT_IN), "mine")
    assert isinstance(registry.algorithm_named("mine"), Right)
    assert registry.is_installed("mine")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("Missing", "cannot be loaded: module '.*' has no attribute 'Missing'"),
        ("install", "is no afl.Algorithm"),
        ("Renamed", "is an algorithm that calls itself 'other'; the names must be the same"),
        ("Greedy", "takes 'etaq', which is none of block, downlink, dual, dual_loss, eta_q, "),
        ("Shadowing", "calls an option of its own 'rounds', a name that is taken"),
    ],
)
def test_what_is_no_algorithm_is_refused_with_its_entry_point(
    install: Any, attribute: str, message: str
) -> None:
    install(attribute)
    with pytest.raises(
        ConfigError, match=rf"the entry point 'mine' of afl.algorithms, .*:{attribute}, {message}"
    ):
        registry.algorithm_named("mine")


def test_what_is_not_installed_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"no entry point of that name .* afl\.algorithms; did you mean 'afl-com'"
    ):
        registry.algorithm_named("afl-con")


@pytest.mark.parametrize(
    ("option", "right", "wrong", "words"),
    [
        (
            AlgorithmOption("x", "it", least=0.0, most=1.0),
            [0, 1, 0.5],
            [-0.1, 2, True, "0.5"],
            "a number from 0 to 1",
        ),
        (AlgorithmOption("x", "it"), [1e300, -3], [float("inf"), float("nan"), 10**400, None], "a number"),
        (AlgorithmOption("x", "it", most=2.0), [2.0, -9], [2.1], "a number of at most 2"),
        (AlgorithmOption("x", "it", "count", least=1), [1, 7], [0, 1.0, True], "a whole number from 1"),
        (AlgorithmOption("x", "it", "flag"), [True, False], [0, "true", None], "true or false"),
        (AlgorithmOption("x", "it", "text"), ["", "a"], [1, None], "text"),
        (AlgorithmOption("x", "it", "text", choices=("a", "b")), ["a"], ["c", 1], "a or b"),
    ],
)
def test_an_option_takes_what_it_says(
    option: AlgorithmOption, right: list[Any], wrong: list[Any], words: str
) -> None:
    assert all(map(option.takes, right))
    assert not any(map(option.takes, wrong))
    assert option.accepted == words
