"""What the round engine makes: a step to broadcast, what closed one, what a round and an evaluation were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afl.core.algorithms.base import Arrays
from afl.core.grid import IntegerRound
from afl.core.messages import Payload, Step


@dataclass(frozen=True)
class Opening:
    """A step to broadcast.

    Attributes:
        dual_weights: what the workers are told of q, ``[m]``; empty where a step that follows brings it.
        participants: the workers that answer it, ascending; the others need not hear of it.
        left_out: those of them whose answer would not count: a process that has others need not make it.
    """

    step: Step
    payloads: tuple[Payload, ...]
    dual_weights: NDArray[np.float64]
    participants: Sequence[int]
    left_out: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Evaluation:
    """What the workers reported of the model after ``round`` updates, indexed by worker id.

    Attributes:
        synchronization: the synchronization round it follows.
        diverged: workers whose copy of the model is not the server's.
        absent: workers that it was closed without, whose metrics are empty.
        non_finite: those of them that had metrics which are not finite.
        examples: how many each was tested on; empty where losses are hidden.
        residual_norms: the Euclidean norms of the workers' residuals; 0 for a worker that keeps none, or is
            absent; empty with secure aggregation, where they are not told.
        means: of the workers' metrics by name, where those are not told.
        smooth_worst: the smooth worst loss (:data:`afl.core.secrecy.fixed_point.SHARPNESS`), where the
            workers' are not told.
        tensor_residual_norms: for each parameter tensor, by its name, the largest of the norms of its part of
            the workers' residuals; empty where these are not told.
        warnings: of sites (:class:`afl.core.rounds.site_watch.SiteWatch`), a sentence each.
    """

    round: int
    synchronization: int
    metrics: tuple[dict[str, float], ...]
    examples: tuple[int, ...]
    diverged: tuple[int, ...]
    absent: tuple[int, ...] = ()
    non_finite: tuple[int, ...] = ()
    residual_norms: tuple[float, ...] = ()
    means: Mapping[str, float] | None = None
    smooth_worst: float | None = None
    tensor_residual_norms: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Evaluation:
        """From what ``dataclasses.asdict`` makes of one, also by way of JSON."""
        return cls(
            round=values["round"],
            synchronization=values["synchronization"],
            metrics=tuple(values["metrics"]),
            examples=tuple(values["examples"]),
            diverged=tuple(values["diverged"]),
            absent=tuple(values["absent"]),
            non_finite=tuple(values["non_finite"]),
            # States of before there were any have none.
            residual_norms=tuple(values.get("residual_norms", ())),
            means=values.get("means"),
            smooth_worst=values.get("smooth_worst"),
            tensor_residual_norms=values.get("tensor_residual_norms", {}),
            warnings=tuple(values.get("warnings", ())),
        )


@dataclass(frozen=True)
class RoundSummary:
    """A closed synchronization round.

    Attributes:
        round: how many update rounds are complete with it.
        synchronization: its number; the same as ``round`` unless workers take several local steps.
        losses: l_i, ``[m]``; NaN for a worker that was not asked, or absent.
        dual_weights: q_t that the round used, ``[m]``.
        absent: workers that a phase of it was closed without, ascending.
        integers: what its integer messages were like; ``None`` where values are float32.
        mean_loss: of all workers, where their own losses and weights are not told, and are NaN.
    """

    round: int
    synchronization: int
    losses: NDArray[np.float64]
    dual_weights: NDArray[np.float64]
    absent: tuple[int, ...] = ()
    integers: IntegerRound | None = None
    mean_loss: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What closed a step: enough to close it again without its reports.

    Attributes:
        losses: l_i as reported, ``[m]``; NaN for a worker that was not asked, or absent.
        payload: what the next step carries; ``None`` after an evaluation.
        unsent: what else closing made.
        evaluation: of an evaluation.
    """

    step: Step
    losses: NDArray[np.float64]
    payload: Payload | None = None
    unsent: Arrays = field(default_factory=dict)
    evaluation: Evaluation | None = None
