"""What an algorithm needs to know of a run; the names are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from afl.core.algorithms.schedule import CONSTANT, Schedule
from afl.core.record_privacy import RecordPrivacy


@dataclass(frozen=True)
class CompressorChoice:
    """A compressor's name and options, before the dimension is known."""

    name: str = "identity"
    options: Mapping[str, Any] = field(default_factory=dict)


KL_RESTARTS: Final = "kl-restarts"
"""The dual rule of the paper."""


@dataclass(frozen=True)
class DualChoice:
    """The rule that moves the dual weights, and its own options."""

    name: str = KL_RESTARTS
    options: Mapping[str, Any] = field(default_factory=dict)


OPTIMIZERS: Final = ("sgd", "momentum", "adam")

LEAST_EPSILON: Final = 1e-20
"""The roots of float32's squares are 0 or above 3e-23: beside a smaller epsilon some steps would be 0 / 0."""


@dataclass(frozen=True)
class OptimizerChoice:
    """How every copy of the model steps along D.

    Attributes:
        name: one of :data:`OPTIMIZERS`.
        beta_1: the share of the mean of D that stays each round (momentum: of the sum).
        beta_2: that of the mean of its squares (Adam).
        epsilon: what is added to their root (Adam).
    """

    name: str = "sgd"
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True)
class AlgorithmSettings:
    """An algorithm's settings; what it does not use has its default (the configuration refuses it).

    Attributes:
        workers: m.
        rounds: T, in update rounds.
        block: B; update rounds between two restarts of the dual weights (AFL-BR, AFL-Com).
        eta_w: primal step size.
        eta_q: dual step size (DRFA: gamma); only the server uses it.
        largest_weight: alpha, the most that a dual weight may be (AFL-BR, AFL-Com); ``None`` for no cap.
        dual: the rule that moves the dual weights (AFL-BR, AFL-Com).
        uplink: C for the workers' messages (AFL-Com).
        downlink: C for the broadcast (AFL-Com).
        name: the algorithm.
        local_steps: tau, local updates between two synchronizations (FedAvg, DRFA).
        sampled: b, the workers of a synchronization (DRFA); ``None`` for full participation.
        weigh_by_samples: whether the mean weighs each worker by its training examples (FedAvg).
        secure_aggregation: whether the workers' integers are added up modulo ``2^bits``, so that each can be
            masked and only their sum be read.
        hides_losses: whether each worker keeps its dual weight, and the server learns of the losses only
            sums.
        schedule: what the step sizes are multiplied by in each round.
        optimizer: how every copy of the model steps along D; with FedAvg, how the server does.
        server_eta: the server's step size (FedAvg); only the server uses it.
        mean_of_last: of how many last rounds' models the final one is the mean; 0 where it is the last.
        weight_decay: lambda: each update first takes ``eta_w lambda`` of the parameters away.
        clip_norm: the largest norm of a worker's gradient, before its dual weight; ``None`` for no limit.
        held_out: the share of each worker's training records that gives no gradients.
        dual_loss_held_out: whether the losses that move the dual weights are of held-out records.
        records: what protects each record of a worker's; ``None`` for nothing.
        tensors: the lengths of the model's parameter tensors; empty where all are one.
        own: the values of :attr:`afl.core.algorithms.algorithm.Algorithm.options`, by name.
    """

    workers: int
    rounds: int
    block: int
    eta_w: float
    eta_q: float
    uplink: CompressorChoice = CompressorChoice()
    downlink: CompressorChoice = CompressorChoice()
    name: str = "afl-com"
    local_steps: int = 1
    sampled: int | None = None
    largest_weight: float | None = None
    dual: DualChoice = DualChoice()
    weigh_by_samples: bool = False
    secure_aggregation: bool = False
    hides_losses: bool = False
    schedule: Schedule = CONSTANT
    optimizer: OptimizerChoice = OptimizerChoice()
    server_eta: float = 1.0
    mean_of_last: int = 0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    held_out: float = 0.0
    dual_loss_held_out: bool = False
    records: RecordPrivacy | None = None
    tensors: tuple[int, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def synchronizations(self) -> int:
        """How many synchronization rounds the T update rounds take; the last may be shorter."""
        return -(-self.rounds // self.local_steps)

    def eta_w_of(self, round_: int) -> float:
        """eta_w in an update round, 1-based."""
        return self.eta_w * self.schedule.of_round(round_, self.rounds)

    def eta_q_factor(self, round_: int) -> float:
        """What eta_q is multiplied by in an update round."""
        return self.schedule.of_round(round_, self.rounds) if self.schedule.eta_q else 1.0

    @property
    def rescales_residuals(self) -> bool:
        """Whether a residual is kept in units of steps, not of gradients: with a step size that changes,
        where a step is the step size times D or a sum of such (Adam's steps are as long as they are
        whatever D's unit is)."""
        return self.schedule != CONSTANT and self.optimizer.name != "adam"

    def residual_factor(self, made: int, round_: int) -> float:
        """What a residual that round ``made`` left is multiplied by in ``round_``, before the gradient is
        added: ``eta_w(made) / eta_w(round_)``, so that it moves the model as far as it would have then
        (Zheng, Huang, Kwok: "Communication-efficient distributed blockwise momentum SGD with
        error-feedback", NeurIPS 2019). 0 is before there was any."""
        if not made or not self.rescales_residuals:
            return 1.0
        return self.schedule.of_round(made, self.rounds) / self.schedule.of_round(round_, self.rounds)

    def updates_after(self, synchronization: int) -> int:
        """Update rounds that are complete after a synchronization round (1-based; 0 after round 0)."""
        return min(synchronization * self.local_steps, self.rounds)

    def updates_of(self, synchronization: int) -> range:
        """The update rounds, 1-based, of a synchronization round."""
        return range(self.updates_after(synchronization - 1) + 1, self.updates_after(synchronization) + 1)

    def named(self, synchronization: int) -> str:
        """The update rounds of a synchronization round, for a message: ``round 5``, or ``rounds 13-15``."""
        if synchronization < 1:
            return "before its first round"
        updates = self.updates_of(synchronization)
        if not updates:
            return "after its last round"
        first, last = updates[0], updates[-1]
        return f"round {first}" if first == last else f"rounds {first}-{last}"
