"""What a search tries, and how it judges a trial."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afl.config import Config, config_from_text, dump_config
from afl.core.rounds.phases import rounds_since_restart
from afl.errors import ConfigError
from afl_lab.tuning.curve import PENALTY, WINDOW, Curve, Judge
from afl_lab.tuning.search import Trial, best_of
from afl_lab.tuning.space import (
    can_be_cut,
    first_params,
    fixed_overrides,
    overrides_of,
    own_params,
    space_of,
    unaliased,
)

BASE = """
workers: 3
task: {name: digits}
algorithm:
  name: afl-com
  rounds: 400
  eta_w: 0.2
  eta_q: 0.05
  uplink: {name: rand-k, ratio: 0.1, bits: 8}
evaluation: {every: 10, rank_by: accuracy}
run: {seed: 1}
"""


def config(*overrides: str) -> Config:
    return config_from_text(BASE, "test", overrides)


def with_params(params: dict[str, Any], *overrides: str) -> Config:
    base = config(*overrides)
    return config(*overrides, *fixed_overrides(base), *overrides_of(base, params))


def test_the_first_trial_is_the_configuration_itself() -> None:
    (first, *_), own = first_params(config()), config().algorithm
    tried = with_params(first).algorithm
    assert (tried.eta_w, tried.eta_q, tried.block_length) == (own.eta_w, own.eta_q, own.block_length)
    assert (tried.schedule, tried.weight_decay, tried.uplink) == (None, own.weight_decay, own.uplink)
    assert with_params({}).task.held_out == 0.2
    assert with_params({}, "task.held_out=0.3").task.held_out == 0.3


def test_the_trials_after_it_are_of_the_space_and_a_schedule_is_taken_whole() -> None:
    own, quiet, faster, slower = first_params(config())
    algorithm, space = with_params(quiet).algorithm, space_of(config())
    assert quiet.keys() == space.keys()
    assert (algorithm.block, algorithm.weight_decay) == (config().algorithm.block_length, 0.01)
    assert [each["eta_q"] for each in (quiet, faster, slower)] == [0.05, 0.1, 0.025]
    assert all(with_params(each).algorithm.step_schedule.then == "cosine" for each in (quiet, faster, slower))
    assert [can_be_cut(with_params(each)) for each in (own, quiet)] == [True, False]
    assert first_params(config("algorithm.weight_decay=0.1"))[1]["weight_decay"] == 0.1
    averaging = "algorithm.name=fedavg", "algorithm.uplink=null", "algorithm.eta_q=null"
    assert len(first_params(config(*averaging))) == 2
    # The user's own schedule stays.
    given = "algorithm.schedule.then=steps", "algorithm.schedule.at=[200]"
    assert with_params(first_params(config(*given))[1], *given).algorithm.step_schedule.then == "steps"


@pytest.mark.parametrize("name", ["afl-com", "afl-br", "sgda", "fedavg"])
def test_all_of_the_space_makes_configurations(name: str) -> None:
    given = [f"algorithm.name={name}"]
    given += [] if name == "afl-com" else ["algorithm.uplink=null"]
    given += ["algorithm.eta_q=null"] if name == "fedavg" else []
    space = space_of(config(*given))
    assert {"eta_w", "weight_decay"} <= space.keys()
    assert ("eta_q" in space, "block" in space) == (name != "fedavg", name.startswith("afl"))
    for end in (0, -1):
        params = {
            key: each.choices[end] if hasattr(each, "choices") else (each.low, each.high)[end]  # type: ignore[attr-defined]
            for key, each in space.items()
        }
        tried = with_params(params, *given)
        assert tried.algorithm.eta_w == pytest.approx(params["eta_w"], rel=0.01)


@pytest.mark.parametrize(
    ("dual", "searched"),
    [
        ({"name": "kl-regularized", "temperature": 0.3}, {"dual.temperature", "dual.beta"}),
        ({"name": "fixed-share", "uniform": 0.05}, {"eta_q", "dual.uniform"}),
        ({"name": "cvar", "share": 0.2}, {"eta_q", "block", "dual.share"}),
        ({"name": "projected"}, {"eta_q"}),
    ],
)
def test_a_dual_rule_s_own_options_are_searched(dual: dict[str, Any], searched: set[str]) -> None:
    given = [f"algorithm.dual={json.dumps(dual)}"] + (["algorithm.eta_q=null"] * ("eta_q" not in searched))
    space = space_of(config(*given))
    assert {name for name in space if name in {"eta_q", "block"} or name.startswith("dual.")} == searched
    own = with_params(own_params(config(*given)), *given).algorithm
    assert own.dual_choice == config(*given).algorithm.dual_choice
    for end in ("low", "high"):
        params = {name: getattr(space[name], end) for name in searched}
        tried = with_params(params, *given).algorithm.dual_choice
        for name in searched & {f"dual.{option}" for option in tried.options}:
            assert tried.options[name.removeprefix("dual.")] == pytest.approx(params[name], rel=0.01)


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_a_round_sends_no_more_than_before(bits: int) -> None:
    options = with_params({"bits": bits}).algorithm.uplink_compressor.options
    ratio: Any = options["ratio"]
    assert options["bits"] == bits
    assert ratio * bits == pytest.approx(0.1 * 8, rel=0.01)


def test_step_sizes_of_the_theory_become_numbers() -> None:
    theory = [
        "algorithm.eta_w=theory",
        "algorithm.smoothness=2",
        "algorithm.eta_q=theory",
        "algorithm.sigma_q=1",
    ]
    tried = with_params(own_params(config(*theory)), *theory).algorithm
    assert tried.eta_w == pytest.approx(config(*theory).algorithm.eta_w_value, rel=0.01)
    assert tried.smoothness is tried.sigma_q is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["privacy.secure_aggregation=true", "privacy.losses=hidden"], "privacy.losses=shown"),
        (["algorithm.uplink.ratio=theory"], "a number"),
    ],
)
def test_what_cannot_be_tuned_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fixed_overrides(config(*overrides))


def test_only_what_was_given_is_written() -> None:
    text = dump_config(config("run.directory=null"), only_given=True)
    assert config_from_text(text, "test") == config()
    assert "heartbeat" not in text
    assert "directory" not in text


def test_trials_are_judged_by_the_worst_held_out_value() -> None:
    metrics = [
        {"accuracy": 0.1, "held_out_accuracy": 0.8, "loss": 1.0, "held_out_loss": 2.0} for _ in range(2)
    ]
    metrics[1]["held_out_accuracy"] = 0.6
    ranked = Judge.of(config())
    assert ranked.score(ranked.values(metrics)) == 0.6
    assert Judge.of(config("evaluation.rank_by=held_out_loss")).values(metrics) == [-2.0, -2.0]
    unranked = Judge.of(config("evaluation.rank_by=null"))
    assert unranked.values(metrics) == [0.8, 0.6]
    assert unranked.values([{"held_out_loss": 3.0}]) == [-3.0]
    assert unranked.values([*metrics, {}]) == []
    assert not Curve(unranked).see(1, [*metrics, {}])


def test_the_best_rounds_are_those_of_a_mean_over_several_evaluations_and_a_trial_has_its_last() -> None:
    judge = Judge.of(config())
    curve, whole = Curve(judge), Curve(judge, is_whole=True)
    scores = [0.9, *[0.1] * WINDOW, *[0.5] * WINDOW, *[0.2] * WINDOW]
    for number, score in enumerate(scores):
        for each in (curve, whole):
            each.see(10 * number, [{"held_out_accuracy": score}])
    assert (curve.best, curve.round) == (pytest.approx(0.5), 10 * 2 * WINDOW)
    assert (whole.best, whole.round) == (pytest.approx(0.2), 10 * (len(scores) - 1))


@pytest.mark.parametrize("block", [1, 2, 3, 5, 10, 20, 21, 25, 40, 50, 57, 100, 200, 400])
def test_the_evaluations_at_a_trial_s_end_see_several_places_of_its_own_block(block: int) -> None:
    given = with_params({"block": block})
    tried = unaliased(given)
    assert tried.algorithm.block == block
    assert tried.task == given.task
    every = tried.evaluate_every
    assert 1 <= every <= given.evaluate_every == 10
    assert tried.evaluation.rank_by == "accuracy"
    ends = range(every, 401, every)[-WINDOW:]
    places = sorted({rounds_since_restart(round_, block) for round_ in ends})
    assert len(places) >= min(4, block)
    # They span a good part of it, or as much as so many evaluations can.
    assert places[-1] - places[0] >= min(block // 2, (WINDOW - 1) * every - 1, block - every)


def test_trials_with_evaluations_at_different_rounds_are_compared_at_the_same_ones() -> None:
    curves = [Curve(Judge.of(config()), is_whole=True, spacing=10) for _ in range(2)]
    for curve, every in zip(curves, (10, 7), strict=True):
        for round_ in range(every, 141, every):
            before = len(curve.means)
            assert curve.see(round_, [{"held_out_accuracy": round_ / 200}]) == (len(curve.means) > before)
    (_, first), (_, second) = curves[0].means[0], curves[1].means[1]
    assert [round_ for round_, _ in curves[0].means] == [*range(50, 141, 10)]
    assert [round_ for round_, _ in curves[1].means] == [*range(30, 141, 10)]
    assert first == pytest.approx(sum(range(10, 51, 10)) / 5 / 200)
    assert second == pytest.approx(sum(range(14, 43, 7)) / 5 / 200)


def test_the_first_of_equally_good_trials_is_the_best() -> None:
    trials = [Trial(number, {}, "ok", score) for number, score in enumerate([None, 0.5, 0.7, 0.7])]
    best = best_of(trials)
    assert best is not None
    assert best.number == 2
    assert best_of(trials[:1]) is None


def test_what_a_site_lost_counts_more_than_what_the_worst_gained() -> None:
    def lines(*values: float) -> list[dict[str, Any]]:
        return [
            {"round": round_, "workers": [{"accuracy": 0.0, "held_out_accuracy": value} for value in values]}
            for round_ in range(1, WINDOW + 1)
        ]

    judge = Judge.of(config()).with_floor(lines(0.5, 0.8), WINDOW, 0.1)
    assert judge.floor == (pytest.approx(0.4), pytest.approx(0.7))
    assert judge.score([0.6, 0.7]) == pytest.approx(0.6)
    assert judge.score([0.6, 0.68]) == pytest.approx(0.6 - PENALTY * 0.02)
    # What swings about the floor lacks nothing.
    swinging = lines(0.6, 0.67)[:2] + lines(0.6, 0.73)[:3]
    assert Curve.of(judge, swinging).best == pytest.approx(0.6)
    loss = [{"round": line["round"], "workers": [{"held_out_loss": 2.0}]} for line in lines(0)]
    lower = Judge.of(config("evaluation.rank_by=loss")).with_floor(loss, WINDOW, 0.1)
    assert lower.floor == (pytest.approx(-2.2),)
    assert lower.score([-2.3]) == pytest.approx(-2.3 - PENALTY * 0.1)
