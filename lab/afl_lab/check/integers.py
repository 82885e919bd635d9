"""Integers in place of float32, tried on a run's first rounds: what they save, what becomes of the loss."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import cast

from afl.config import Config
from afl.config.quantities import shown_bytes, shown_seconds
from afl.config.schema import Compressor
from afl.core.compressors import compressor_class, create
from afl.core.messages import BITS, Kind
from afl.core.randomness import SharedRandomness
from afl.errors import NonFiniteError
from afl.tasks import Task
from afl_lab.check.findings import Report, blaming
from afl_lab.simulation.driver import metered

PROPOSED_BITS = 8
"""Fewer are less accurate than float32 at large steps and with many workers (docs/compressors.md)."""

MOST_ROUNDS, FEWEST_ROUNDS = 40, 20
"""The grid starts at a range of its own, and halves or doubles it each round until it fits the gradients."""

LONGEST_S = 20.0
"""What both tries may take together; a task of longer rounds is not tried."""

UNLIKE_SHARE = 0.5
"""Of what the loss falls by in float32: integers that fall short by more are said to be too coarse."""

UNLIKE_LOSS = 0.02
"""Of the first loss: no smaller difference is told from chance."""

WORTHWHILE = 0.8
"""Of the bytes: integers that save less are not proposed."""


@dataclass(frozen=True)
class Tried:
    """A run's first rounds.

    Attributes:
        losses: mean over the workers, by round.
        up: bytes of all workers, a round: the mean over the later half.
        down: bytes to all workers.
    """

    losses: list[float]
    up: int
    down: int

    @property
    def end(self) -> float:
        """The loss at the end: the mean over the last quarter."""
        return statistics.fmean(self.losses[-(len(self.losses) // 4) :])


def check_integers(
    report: Report, config: Config, task: Task, *, dim: int, dry_seconds: float, round_seconds: float
) -> Tried | None:
    """Try the first rounds with integers and in float32, where the compressor takes both.

    Args:
        dim: d.
        dry_seconds: what a try of a few rounds takes, data included.
        round_seconds: what each round takes.

    Returns:
        the rounds as they are configured, if that is with integers.
    """
    choice = config.algorithm.uplink_compressor
    if (
        not config.algorithm.takes("uplink")
        or config.algorithm.local_steps is not None
        or config.algorithm.downlink_compressor != choice
        or not compressor_class(choice.name).additive_idempotent
    ):
        return None
    configured = cast("int | None", choice.options.get(BITS))
    bits = configured or PROPOSED_BITS
    left = LONGEST_S / 2 - dry_seconds
    rounds = min(MOST_ROUNDS, int(left / max(round_seconds, 1e-6)))
    if rounds < FEWEST_ROUNDS:
        took = shown_seconds(dry_seconds + FEWEST_ROUNDS * round_seconds)
        report.facts["Integers"] = {f"bits: {bits}": f"not tried: {FEWEST_ROUNDS} rounds take {took} here"}
        return None
    plain = {name: value for name, value in choice.options.items() if name != BITS}
    runs = {}
    for width in (None, bits):
        options = plain if width is None else {**plain, BITS: width}
        try:
            runs[width] = _tried(_with(config, Compressor(name=choice.name, **options)), task, rounds)
        except NonFiniteError:
            if width != configured:
                return None
            with blaming(report, f"the first {rounds} rounds"):
                raise
    exact, coarse = runs[None], runs[bits]
    _describe(report, exact, coarse, bits)
    too_coarse = coarse.end - exact.end > max(
        UNLIKE_SHARE * abs(exact.losses[0] - exact.end), UNLIKE_LOSS * abs(exact.losses[0])
    )
    sent, instead = coarse.up + coarse.down, exact.up + exact.down
    if configured is not None and too_coarse:
        report.warn(
            "algorithm.uplink.bits",
            f"with {bits} bits the mean loss is {coarse.end:.4g} after {rounds} rounds, in float32 it is "
            f"{exact.end:.4g}",
            "take more bits, or try a few hundred rounds of each: the grid begins with a range of its own",
        )
    elif configured is None and not too_coarse and sent <= WORTHWHILE * instead:
        residual = ""
        if create(choice.name, dim, plain).lossless:
            residual = f"; each worker then keeps a residual of {shown_bytes(4 * dim)}"
        report.note(
            "algorithm.uplink",
            f"its values travel as float32; with bits: {bits} a round sends {shown_bytes(sent)} in place of "
            f"{shown_bytes(instead)}, and in the first {rounds} rounds the loss falls alike",
            f"add bits: {bits} to algorithm.uplink{residual}",
        )
    return None if configured is None else coarse


def _tried(config: Config, task: Task, rounds: int) -> Tried:
    assert config.run.seed is not None
    randomness = SharedRandomness.from_int(config.run.seed)
    # No evaluation within them, and none at the end, which is never reached.
    total = max(config.algorithm.rounds, rounds + 1)
    driver, meter = metered(config, task, randomness, rounds=total, evaluate_every=total + 1)
    losses: list[float] = []
    half = meter.counters
    for step in driver.steps():
        assert step.kind is Kind.TRAIN
        last = driver.engine.last_round
        assert last is not None
        # Where losses are hidden, a round tells their mean alone.
        losses.append(float(last.losses.mean()) if last.mean_loss is None else last.mean_loss)
        if len(losses) == rounds // 2:
            half = meter.counters.copied()
        if len(losses) == rounds:
            break
    counted = meter.counters
    later = rounds - rounds // 2
    return Tried(
        losses,
        (counted.uplink.total - half.uplink.total) // later,
        (counted.downlink.total - half.downlink.total) // later,
    )


def _with(config: Config, compressor: Compressor) -> Config:
    algorithm = config.algorithm.model_copy(update={"uplink": compressor, "downlink": None})
    return config.model_copy(update={"algorithm": algorithm})


def _describe(report: Report, exact: Tried, coarse: Tried, bits: int) -> None:
    rounds, first = len(exact.losses), exact.losses[0]
    report.values["integers"] = {
        BITS: bits,
        "rounds": rounds,
        "first_loss": first,
        "float32": {"loss": exact.end, "up": exact.up, "down": exact.down},
        "integers": {"loss": coarse.end, "up": coarse.up, "down": coarse.down},
    }
    report.facts["Integers"] = {
        "tried": f"{rounds} rounds, in float32 and with bits: {bits}",
        "mean loss": f"{first:.4g} at first; {exact.end:.4g} in float32, {coarse.end:.4g} as integers",
        "up, a round": f"{shown_bytes(exact.up)} in float32, {shown_bytes(coarse.up)} as integers",
        "down, a round": f"{shown_bytes(exact.down)} in float32, {shown_bytes(coarse.down)} as integers",
    }
