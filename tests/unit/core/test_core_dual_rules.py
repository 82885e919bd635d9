"""Each dual rule: against a few lines of numpy, with any finite loss, from its state to the bit; and one's
own rules."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from afl.core import dual as registry
from afl.core import installed as installing
from afl.core.algorithms.algorithm import dual_rule
from afl.core.algorithms.settings import AlgorithmSettings, DualChoice
from afl.core.dual import Cvar, DualRule, DualWeights, FixedShare, KlRegularized
from afl.core.options import AlgorithmOption
from afl.errors import ConfigError

OPTIONS: dict[str, dict[str, Any]] = {
    "kl-restarts": {},
    "projected": {},
    "cvar": {"share": 0.4},
    "fixed-share": {"uniform": 0.05},
    "kl-regularized": {"temperature": 0.5, "beta": 0.8},
}


def rule_of(name: str, workers: int = 5, eta_q: float = 0.7) -> DualRule:
    settings = AlgorithmSettings(workers, 100, 9, 0.1, eta_q, dual=DualChoice(name, OPTIONS[name]))
    return dual_rule(settings)


def losses_of(rounds: int, workers: int = 5) -> NDArray[np.float64]:
    return np.random.default_rng(rounds).gamma(2.0, 1.0, (rounds, workers))


def test_all_built_in_rules_are_tried_here() -> None:
    assert registry.rule_names()[: len(OPTIONS)] == tuple(OPTIONS)
    assert type(dual_rule(AlgorithmSettings(3, 9, 3, 0.1, 0.1))) is DualWeights
    for name in OPTIONS:
        rule = registry.rule_named(name)
        assert rule.description, name
        assert not rule.proven.endswith("."), name


def test_kl_regularized_weights_are_a_softmax_of_the_average() -> None:
    rule, losses = KlRegularized(5, 0.5, 0.8), losses_of(30)
    average = losses[0]
    for round_, row in enumerate(losses, start=1):
        rule.update(round_, row)
        average = row if round_ == 1 else 0.8 * average + 0.2 * row
        raised = np.exp(average / 0.5)
        np.testing.assert_allclose(rule.weights, raised / raised.sum(), rtol=1e-12)


def test_a_fixed_share_of_uniform_weights_is_mixed_in() -> None:
    rule, losses = FixedShare(5, 0.7, 0.05), losses_of(30)
    q = np.full(5, 0.2)
    for round_, row in enumerate(losses, start=1):
        rule.update(round_, row)
        q = q * np.exp(0.7 * row)
        q = 0.95 * q / q.sum() + 0.05 / 5
        np.testing.assert_allclose(rule.weights, q, rtol=1e-12)
    # A weight is back within the rounds that its floor says, where without the share it would need 1000.
    for round_ in range(1000):
        rule.update(round_, np.array([1.0, 0, 0, 0, 0]))
    needed = next(n for n in range(100) if _leads_after(rule, n))
    assert needed <= np.log(5 / 0.05) / 0.7 + 1


def _leads_after(rule: DualRule, _: int) -> bool:
    rule.update(1, np.array([0, 1.0, 0, 0, 0]))
    return bool(rule.weights.argmax() == 1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.4, 0.55, 1.0])
def test_cvar_is_a_largest_weight(share: float) -> None:
    largest = None if share <= 0.2 else 1 / (share * 5)
    one, other = Cvar(5, 0.7, 9, share), DualWeights(5, 0.7, 9, largest)
    for round_, row in enumerate(losses_of(30), start=1):
        one.update(round_, row)
        other.update(round_, row)
        assert one.weights.tobytes() == other.weights.tobytes()
        if share == 1:
            np.testing.assert_allclose(one.weights, 0.2, rtol=1e-12)
    # Against losses that stay, they become the mean of the worst share's.
    for round_ in range(1, 9):
        one.update(round_, np.array([9.0, 0, 80, 0, 90]))
    if share == 0.4:
        np.testing.assert_allclose(one.weights, [0, 0, 0.5, 0, 0.5], atol=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("large", [1e308, -1e308, np.finfo(np.float64).max])
def test_any_finite_loss_leaves_weights_on_the_simplex(name: str, large: float) -> None:
    rule = rule_of(name)
    with np.errstate(invalid="raise", divide="raise"):
        for round_ in range(1, 60):
            rule.update(round_, np.roll(np.array([large, -large, 0.0, 1.0, 2.0]), round_))
            assert rule.weights.min() >= 0
            assert rule.weights.max() <= 1
            assert rule.weights.sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_rule_goes_on_from_its_state_to_the_bit(name: str) -> None:
    one, losses = rule_of(name), losses_of(40)
    for round_, row in enumerate(losses[:17], start=1):
        one.update(round_, row)
    state = {key: array.copy() for key, array in one.state().items()}
    assert all(key.startswith("dual_") for key in state)
    other = rule_of(name)
    other.restore(state)
    for round_, row in enumerate(losses[17:], start=18):
        one.update(round_, row)
        other.update(round_, row)
        assert one.weights.tobytes() == other.weights.tobytes()


class Median(DualRule):
    """All weight on the workers above a quantile, alike."""

    name = "mine"
    description = "a rule of one's own"
    options = (AlgorithmOption("quantile", "which", default=0.5, least=0.0, most=1.0),)

    def __init__(self, workers: int, quantile: float) -> None:
        super().__init__(workers)
        self._quantile = quantile

    def update(self, round_: int, losses: NDArray[np.float64]) -> None:
        above = losses >= np.quantile(losses, self._quantile)
        self.weights = above / above.sum()


class Renamed(Median):
    name = "other"


class Greedy(Median):
    takes = frozenset({"local_steps"})


class Shadowing(Median):
    options = (AlgorithmOption("name", "it"),)


class Unfinished(DualRule):
    name = "mine"


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs an attribute of this module under the name ``mine``."""

    def installed(attribute: str) -> None:
        point = EntryPoint("mine", f"{__name__}:{attribute}", "afl.dual_rules")
        monkeypatch.setattr(
            installing, "entry_points", lambda group: [point] if group == "afl.dual_rules" else []
        )
        registry.rule_named.cache_clear()

    yield installed
    registry.rule_named.cache_clear()


def test_an_installed_rule_is_made_with_its_options(install: Any) -> None:
    install("Median")
    assert registry.rule_names()[-1] == "mine"
    settings = AlgorithmSettings(4, 9, 3, 0.1, 0.1, dual=DualChoice("mine", {"quantile": 0.75}))
    rule = dual_rule(settings)
    assert rule.weights.tolist() == [0.25] * 4
    rule.update(1, np.array([1.0, 4.0, 2.0, 3.0]))
    assert rule.weights.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("Missing", "cannot be loaded"),
        ("install", "is no subclass of afl.DualRule with a name and an update"),
        ("Unfinished", "is no subclass of afl.DualRule with a name and an update"),
        ("Renamed", "is a dual rule that calls itself 'other'; the names must be the same"),
        ("Greedy", "takes 'local_steps', which is none of block, eta_q, largest_weight; "),
        ("Shadowing", "calls an option of its own 'name', a name that is taken"),
    ],
)
def test_what_is_no_rule_is_refused_with_its_entry_point(install: Any, attribute: str, message: str) -> None:
    install(attribute)
    with pytest.raises(
        ConfigError, match=rf"the entry point 'mine' of afl.dual_rules, .*:{attribute}, {message}"
    ):
        registry.rule_named("mine")
