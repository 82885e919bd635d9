"""How a run gets on: its phase and what people should do about it, its rate, and the time that is left."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from afl.config.quantities import shown_seconds
from afl.errors import ExitCode
from afl.paths import as_argument
from afl.runs.files import model_file
from afl.security.identity import WorkerIds
from afl.terminal.view import some_of
from afl_server.federation.snapshot import Snapshot

# A step that is open for less is not called stalled, however short the steps before it were.
STALLED_AFTER_S = 5.0
STALLED_TIMES = 5  # nor is one that is open for less than so many times as long as the last of its kind

FEWEST_ROUNDS = 3  # that tell a rate
LONGEST_IDS = 40  # characters of the workers' ids in a command


def phase_of(snapshot: Snapshot, now: float) -> tuple[str, str]:
    """The phase that the run is in, and what people should know of it and do."""
    run, ending = snapshot.run, snapshot.ending
    if ending is not None:
        if ending.code is ExitCode.OK:
            directory = Path(run.directory)
            model = f"On the server's machine, its model is {directory / model_file('final')}"
            reason = f"{ending.reason[:1].upper()}{ending.reason[1:]}"
            return "finished", f"{reason}. {model}. Next: afl inspect {as_argument(directory)}"
        if ending.can_resume:
            return "stopped", (
                f"The run is stopped and can be resumed: {ending.reason}. The same command resumes it."
            )
        return "aborted", f"The run has ended before its last round: {ending.reason}."
    missing, step = snapshot.missing, snapshot.step
    if snapshot.last_round is None and missing:
        here = f"{run.workers - len(missing)} of {run.workers} are here"
        return "waiting", f"Waiting for workers: {here}. {_start(missing)}"
    if not is_stalled(snapshot, now):
        return "running", "\n".join(snapshot.evaluation.warnings if snapshot.evaluation else ())
    gone = sorted(set(missing).intersection(step.awaited))
    whom, what, advice = (
        (gone, "not connected", _start(gone))
        if gone
        else (step.awaited, "still computing", "It closes when all have reported.")
    )
    named = (
        f"worker {whom[0]}, which is"
        if len(whom) == 1
        else f"{len(whom)} workers ({some_of(whom)}), which are"
    )
    waits = f"The round waits for {named} {what}; it is open for {shown_seconds(now - step.opened_at)}."
    return "stalled", f"{waits} {advice}"


def is_stalled(snapshot: Snapshot, now: float) -> bool:
    """Whether the open step waits for a worker, and for much longer than the last of its kind."""
    step = snapshot.step
    usual = snapshot.step_seconds.get(step.kind, 0.0)
    return bool(step.awaited) and now - step.opened_at >= max(STALLED_AFTER_S, STALLED_TIMES * usual)


def _start(missing: Sequence[int]) -> str:
    """What to do about workers that are not there."""
    ids = str(WorkerIds.of(missing))
    command = f"afl-worker --id {ids if len(ids) <= LONGEST_IDS else 'IDS'} ..."
    if len(missing) == 1:
        return (
            f"If it does not run, start it at its site ({command}); if it does, its log says what is wrong."
        )
    return f"Start those that do not run, at their sites ({command}); the others' logs say what is wrong."


def seconds_left(snapshot: Snapshot, now: float) -> float | None:
    """At the mean rate; ``None`` while there is none, a worker is missing, or a step takes too long."""
    rate = None if snapshot.missing or is_stalled(snapshot, now) else mean_rate(snapshot, now)
    return None if rate is None else (snapshot.run.rounds - snapshot.closed) / rate


def mean_rate(snapshot: Snapshot, now: float) -> float | None:
    """Rounds a second since the first that this process closed; ``None`` before the second."""
    since, first = snapshot.first_closed or (now, snapshot.closed)
    # Two rounds may be closed within one tick of the clock.
    return (snapshot.closed - first) / max(now - since, 1e-6) if snapshot.closed > first else None


class Rate:
    """Rounds a second over the last half minute or so; 0 while the run waits for a straggler.

    Where that holds too few rounds, it is over all since the first that this process closed.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=31)

    def after(self, snapshot: Snapshot, now: float) -> float | None:
        """The rate now; ``None`` before the second round is closed, and when the run is over."""
        if snapshot.is_over:
            return None
        if not self._seen or now - self._seen[-1][0] >= 1.0:
            self._seen.append((now, snapshot.closed))
        mean = mean_rate(snapshot, now)
        if mean is not None and is_stalled(snapshot, now):
            return 0.0
        since, first = self._seen[0]
        if now - since < 1.0 or snapshot.closed - first < FEWEST_ROUNDS:
            return mean
        return (snapshot.closed - first) / (now - since)
