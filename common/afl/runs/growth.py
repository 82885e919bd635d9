"""Whether a run's loss has grown instead of falling. Pure, from plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

GROWN_TIMES: Final = 5.0
"""How many times as large as at the beginning the largest loss is when a run is said to have diverged.

Runs that go well also end above their first evaluation now and then, by a third, and at up to three times
their lowest: the largest loss over the workers goes up and down while the dual weights follow it.
"""

ADVICE_GROWN: Final = "begin again with a smaller algorithm.eta_w, in a new run.directory"


def growth(
    first_round: Mapping[str, Any] | None, first: Mapping[str, Any] | None, last: Mapping[str, Any] | None
) -> str:
    """What to say of a largest loss that has grown; empty if it has not, or if that is not known.

    It is compared with the beginning: the first round, whose loss is of the model that nobody has trained,
    and the first evaluation, whichever was lower. A loss below 0 has grown if it has risen by four times its
    absolute value, as one above 0 has that is five times as large.

    Args:
        first_round: the run's first line of a round in ``metrics.jsonl``.
        first: its first evaluation.
        last: its last one.
    """
    if last is None:
        return ""
    beginnings = []
    if first_round is not None:
        beginnings.append((first_round["loss_max"], f"in round {first_round['round']}"))
    if first is not None and first["round"] < last["round"]:
        beginnings.append((first["max_loss"], f"after round {first['round']}"))
    if not beginnings:
        return ""
    lowest, when = min(beginnings)
    end = last["max_loss"]
    if end - lowest <= (GROWN_TIMES - 1) * abs(lowest):
        return ""
    return (
        f"the largest loss has grown from {lowest:.5g} {when} to {end:.5g} after round {last['round']}; "
        f"{ADVICE_GROWN}"
    )
