"""A snapshot of a run, from the coordinator as it is."""

from __future__ import annotations

import time

from afl_server.coordinator import Coordinator
from afl_server.federation.snapshot import Connection, Ending, OpenStep, RunDescription, Snapshot
from afl_server.session import Session, State


def description_of(coordinator: Coordinator) -> RunDescription:
    """What stays as it is."""
    algorithm, engine = coordinator.config.algorithm, coordinator.engine
    return RunDescription(
        run_id=coordinator.run_id,
        task=coordinator.config.task.name,
        algorithm=algorithm.name,
        directory=coordinator.records.directory,
        workers=engine.workers,
        rounds=engine.rounds,
        dim=coordinator.vector.dim,
        restart_length=algorithm.restart_length,
        is_compressed=algorithm.name == "afl-com",
        keeps_residuals=engine.algorithm.keeps_residuals,
    )


def snapshot_of(coordinator: Coordinator, run: RunDescription) -> Snapshot:
    """The run now; from any thread."""
    engine, records, roster = coordinator.engine, coordinator.records, coordinator.roster
    ending = None
    if coordinator.is_over:
        ending = Ending(*coordinator.result.result(), coordinator.can_go_on)
    sessions: dict[Session, Connection] = {}
    connections: dict[int, Connection] = {}
    for worker in range(run.workers):
        owner = roster.owner(worker)
        if owner is not None:
            if owner not in sessions:
                expiry = owner.identity.not_after
                sessions[owner] = Connection(owner.peer, owner.workers, owner.state is State.READY, expiry)
            connections[worker] = sessions[owner]
    known = frozenset(worker for worker in range(run.workers) if roster.was_known(worker))
    absences = {worker: roster.absence(worker) for worker in roster.missing()}
    now = time.monotonic()
    return Snapshot(
        run=run,
        began_at=coordinator.started_at - coordinator.seconds_before,
        ending=ending,
        step=OpenStep(
            kind=engine.step.kind,
            round=engine.open_round,
            synchronization=engine.step.position.round,
            opened_at=coordinator.step_opened_at,
            awaited=engine.missing(),
            waiting_bytes=engine.collector.waiting_bytes,
        ),
        updates_applied=engine.updates_applied,
        last_round=records.round,
        round_seconds=records.round_seconds,
        first_closed=coordinator.first_round,
        step_seconds=dict(coordinator.step_seconds),
        report_seconds=coordinator.report_seconds,
        outcome_seconds=coordinator.outcome_seconds,
        dual_weights=engine.dual_weights,
        evaluation=records.last_evaluation,
        last=records.evaluations[-1] if records.evaluations else None,
        best=records.best,
        residual_norm=coordinator.residual_norm,
        sessions=len(roster),
        connections=connections,
        known=known,
        lost_at={worker: now - absence for worker, absence in absences.items() if absence is not None},
        counters=coordinator.counters.copied(),
        sum_restarts=engine.restarts,
        incidents={str(incident): counts for incident, counts in coordinator.incidents.counts.items()},
    )
