"""What is told of a configuration that a run takes, but that probably is not what is meant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from afl.config import Config
from afl.config.compressors import BITS_TAKERS, RATIO_TAKERS, THEORY, resolved_options
from afl.core.algorithms.registry import algorithm_named
from afl.core.record_privacy import epsilon_of_tests
from afl.core.rounds.phases import phases_seen, sees_few_phases, spread_spacing
from afl.errors import ConfigError

RANDOM: Final = frozenset(BITS_TAKERS).intersection(RATIO_TAKERS)
"""Compressors that let a random part of what is to be sent pass in a round, whatever it holds."""

MOST_GROWTH: Final = 2.0
"""How far the logarithm of a weight may move, for each unit of loss, while a coordinate waits. Runs at 1 went
well on all data; some at 3 and most at 10 collapsed (docs/algorithm.md)."""


@dataclass(frozen=True)
class Advice:
    """A key, what is the matter with its value and why, and what to do."""

    key: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}; {self.advice}"


def advice_on(config: Config) -> Iterator[Advice]:
    """All advice on a configuration, in a fixed order; most have none."""
    yield from _phases(config)
    yield from _runs_ahead(config)
    yield from _mixed_steps(config)
    yield from _idle_schedule(config)
    yield from _tests_budget(config)


def _phases(config: Config) -> Iterator[Advice]:
    algorithm, every = config.algorithm, config.evaluate_every
    block = algorithm.restart_length
    if not sees_few_phases(algorithm.rounds, every, block):
        return
    places = phases_seen(every, block)
    where = "a block's end" if places == 1 else f"{places} of its {block} places"
    yield Advice(
        "evaluation.every",
        f"with {every}, and dual weights that restart every {block} rounds, all evaluations show the model "
        f"at {where}, and how the worst worker is served changes within a block",
        f"set it to auto, which is {spread_spacing(algorithm.rounds, block)} here",
    )


def _runs_ahead(config: Config) -> Iterator[Advice]:
    """A compressor that passes a random part of the coordinates lets each wait d/k rounds on average; weights
    that move far in that time follow losses of a model that has not answered yet. A restart ends it."""
    algorithm, eta_q = config.algorithm, config.eta_q_value
    up = algorithm.uplink_compressor
    if not algorithm.takes("uplink") or up.name not in RANDOM:
        return
    ratio: Any = resolved_options(up.name, up.options, workers=config.workers, is_exact_down=True)["ratio"]
    delay = min(1 / ratio, algorithm.restart_length or algorithm.rounds)
    if eta_q * delay <= MOST_GROWTH:
        return
    yield Advice(
        "algorithm.eta_q",
        f"with {up.name} at ratio {ratio:g} a coordinate waits {1 / ratio:.3g} rounds on average, and in "
        f"{delay:.3g} rounds the weight of a worker whose loss is 1 higher grows by e^{eta_q * delay:.2g}: "
        "weights run ahead of the model, and training can collapse",
        f"set it to at most {1 / delay:.2g}, or take a larger ratio",
    )


def _mixed_steps(config: Config) -> Iterator[Advice]:
    algorithm = config.algorithm
    if algorithm_named(algorithm.name).has_theorems and algorithm.eta_q == THEORY != algorithm.eta_w:
        yield Advice(
            "algorithm.eta_q",
            "the theorems' value goes with their eta_w, under which the model hardly moves in a block; with "
            "one of your own, it is usually three to six times too large",
            f"set a number, such as {config.eta_q_value / 4:.2g}",
        )


def _idle_schedule(config: Config) -> Iterator[Advice]:
    """The factor rises to 1 in the warm-up, and never again: the first and the last round tell all."""
    algorithm, rounds = config.algorithm, config.algorithm.rounds
    first, last = (algorithm.step_schedule.of_round(round_, rounds) for round_ in (1, rounds))
    if algorithm.schedule is None or (first, last) != (1, 1):
        return
    yield Advice(
        "algorithm.schedule",
        f"the step size is the same in all {rounds} rounds",
        "set warm_up to 2 or more, then: cosine with a final below 1, or then: steps with a round before the "
        "last in at; or leave it out",
    )


def _tests_budget(config: Config) -> Iterator[Advice]:
    """The steps' noise follows from ``epsilon``, that of evaluations is given: they may spend it all."""
    records = config.privacy.record_privacy
    if records is None or records.epsilon is None or records.metric_noise is None:
        return
    evaluations = config.planned_evaluations
    try:
        cost = epsilon_of_tests(records, evaluations)
    except ConfigError:
        # A server need not have the library.
        return
    if cost > records.epsilon:
        yield Advice(
            "privacy.records.metric_noise",
            f"with {records.metric_noise:g}, {evaluations} evaluations cost a test record an epsilon of "
            f"{cost:.3g}, and workers end before they spend more than {records.epsilon:g}",
            "raise it, or evaluate less often (evaluation.every)",
        )
