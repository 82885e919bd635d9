"""A run at one moment, for whoever shows it: pages, metrics, the live view.

Plain data. Readers run in threads of their own, so the run replaces whatever a snapshot holds and never
changes it, but for the numbers of single workers (``report_seconds``, ``incidents``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from afl.core.messages import Kind, Step
from afl.core.rounds.results import Evaluation, RoundSummary
from afl.errors import ExitCode
from afl.names import Names
from afl_server.federation.counters import Counters
from afl_server.federation.evaluation_summary import EvaluationSummary


@dataclass(frozen=True)
class RunDescription:
    """What does not change while a run lasts.

    Attributes:
        workers: m.
        rounds: T, in update rounds.
        dim: d, the trainable parameters.
        restart_length: B, the update rounds between two restarts of the dual weights; 0 if they never do.
        keeps_residuals: whether workers keep an uplink residual.
        hides_losses: whether each worker's own losses, metrics and dual weight are hidden from the server.
        record_privacy: what protects each record, in words; empty where nothing does.
    """

    run_id: str
    task: str
    algorithm: str
    directory: str
    workers: int
    rounds: int
    dim: int
    restart_length: int
    is_compressed: bool
    keeps_residuals: bool
    hides_losses: bool = False
    record_privacy: str = ""


@dataclass(frozen=True)
class Connection:
    """A session that speaks for some workers, ascending.

    Attributes:
        is_ready: whether it takes steps.
        certificate_expiry: of the peer's certificate, in Unix time; ``None`` if it has shown none.
        version: of its afl, as it says.
        ready_at: since when it has been ready, in seconds of the monotonic clock; ``None`` before.
    """

    peer: str
    workers: Sequence[int]
    is_ready: bool
    certificate_expiry: float | None
    version: str
    ready_at: float | None

    def seconds(self, now: float) -> float | None:
        """For how long it has been ready; ``None`` if it is not yet."""
        return None if self.ready_at is None else now - self.ready_at


@dataclass(frozen=True)
class OpenStep:
    """The step that is open.

    Attributes:
        round: the update round that its synchronization ends with.
        synchronization: its synchronization round; another number where workers take local steps.
        awaited: the workers whose report it waits for, ascending.
        waiting_bytes: of payloads held for workers whose turn in the sum has not come.
    """

    kind: Kind
    round: int
    synchronization: int
    opened_at: float
    awaited: Sequence[int]
    waiting_bytes: int


@dataclass(frozen=True)
class ClosedStep:
    """The last step that was closed; times are of the monotonic clock.

    Attributes:
        closed_at: once its outcome was durable, which took ``outcome_seconds``.
    """

    step: Step
    opened_at: float
    closed_at: float
    outcome_seconds: float


@dataclass(frozen=True)
class Ending:
    """How the run, or this process's part of it, has ended; whether the run itself can be resumed."""

    code: ExitCode
    reason: str
    can_resume: bool


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; every ``..._at`` is in seconds of the monotonic clock.

    Attributes:
        began_at: when the run began; earlier by as long as earlier processes ran it.
        ending: ``None`` while it goes on.
        updates_applied: how many update rounds the model has behind it.
        last_round: the last closed one; it took ``round_seconds``.
        first_closed: when this process closed its first round, and which.
        step_seconds: how long the last closed step of each kind was open.
        report_seconds: how long after its step was opened each worker's last report was complete, ``[m]``;
            NaN before its first.
        outcome_seconds: how long it took to make the last closed step's outcome durable.
        dual_weights: q of the open round, ``[m]``; NaN where losses are hidden.
        evaluation: the last one, by worker; ``last`` sums it up.
        best: the one whose worst worker was served best.
        residual_norm: of the server's residual at this process's last evaluation, where it keeps one.
        sessions: how many are open, also such as speak for no worker yet.
        connections: by worker; of those that a session speaks for.
        names: of the workers' sites.
        known: workers that some process has been ready as.
        lost_at: of known workers that are not ready: when they were lost.
        counters: of the whole run.
        sum_restarts: rounds whose sum had to begin again.
        quarantined: workers that steps are closed without, whatever they report.
        incidents: how often each has happened to each worker in this process, ``[m]``.
    """

    run: RunDescription
    began_at: float
    ending: Ending | None
    step: OpenStep
    updates_applied: int
    last_round: RoundSummary | None
    round_seconds: float
    first_closed: tuple[float, int] | None
    step_seconds: Mapping[Kind, float]
    report_seconds: Sequence[float]
    outcome_seconds: float
    dual_weights: NDArray[np.float64]
    evaluation: Evaluation | None
    last: EvaluationSummary | None
    best: EvaluationSummary | None
    residual_norm: float | None
    sessions: int
    connections: Mapping[int, Connection]
    names: Names
    known: Collection[int]
    lost_at: Mapping[int, float]
    counters: Counters
    sum_restarts: int
    quarantined: Collection[int]
    incidents: Mapping[str, Sequence[int]]

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens in this process."""
        return self.ending is not None

    @property
    def integers(self) -> dict[str, float | None] | None:
        """What the last closed round's integer messages were like; ``None`` where values are float32."""
        integers = self.last_round and self.last_round.integers
        return None if integers is None else asdict(integers)

    @property
    def sites(self) -> list[str | None] | None:
        """The names of all sites by worker id; ``None`` where there are none."""
        return [self.names.get(worker) for worker in range(self.run.workers)] if self.names else None

    @property
    def closed(self) -> int:
        """The last closed update round; 0 before the first."""
        return 0 if self.last_round is None else self.last_round.round

    def missing_for(self, worker: int, now: float) -> float | None:
        """Seconds since a worker was lost, 0 for one that is there; ``None`` if it has never been ready."""
        return now - self.lost_at.get(worker, now) if worker in self.known else None

    @cached_property
    def missing(self) -> Sequence[int]:
        """The workers without a session that is ready, ascending."""
        found = map(self.connections.get, range(self.run.workers))
        return [worker for worker, session in enumerate(found) if session is None or not session.is_ready]
