"""Prometheus metrics, computed from a snapshot of the run when they are scraped."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry

from afl.core.record_privacy import METRIC as PRIVACY_EPSILON
from afl.daemon.metrics import Value, families, registry_of
from afl.runs.metrics import Ranked, ranked
from afl.wire.accounting import Direction, Part, Traffic
from afl_server.federation.evaluation_summary import train_loss_of
from afl_server.federation.snapshot import Snapshot
from afl_server.network.door import Strangers
from afl_server.pages.status import STATES, state_of

_MEANINGS: Final = {
    # As Prometheus shows them: counters end with _total, labels are in braces.
    "afl_run_info{run_id,algorithm,task}": "1, labelled with the run's id, algorithm and task",
    "afl_run_state{state}": "1 for the state that the run is in, 0 for the others",
    "afl_round": "the open update round",
    "afl_synchronization": "the open synchronization round; not the update round if workers take local steps",
    "afl_rounds": "T, the update rounds of the run",
    "afl_workers": "m, the workers of the run",
    "afl_workers_ready": "workers with a session that is ready",
    "afl_site_info{worker,site}": "1, labelled with the name of each worker's site, where it has one",
    "afl_worker_ready{worker}": "1 for a worker with a session that is ready, else 0",
    "afl_workers_missing_reports": "workers whose report the open step waits for",
    "afl_worker_awaited{worker}": "1 for a worker whose report the open step waits for, else 0",
    "afl_round_seconds": "duration of the last closed round",
    "afl_open_step_seconds": "how long the open step has been open",
    "afl_step_seconds{kind}": "how long the last closed step of each kind was open",
    "afl_report_seconds{worker}": "how long after its step was opened each worker's last report was complete",
    "afl_outcome_seconds": "how long it took to make the last closed step's outcome durable",
    "afl_dual_weight{worker}": "q, the dual weight of each worker in the open round",
    "afl_block": "B, the update rounds between two restarts of the dual weights; afl-br and afl-com only",
    "afl_dual_restarts_total": "restarts of the dual weights; afl-br and afl-com only",
    "afl_train_loss{worker}": "minibatch loss of each worker in the last closed round",
    "afl_worker_accuracy{worker}": "test accuracy of each worker at the last evaluation",
    "afl_worker_loss{worker}": "test loss of each worker at the last evaluation",
    "afl_worst_worker_accuracy": "lowest test accuracy at the last evaluation",
    "afl_max_worker_loss": "highest test loss at the last evaluation",
    "afl_mean_train_loss": "mean minibatch loss of the workers in the last closed round",
    "afl_mean_worker_accuracy": "mean of the workers' test accuracies at the last evaluation",
    "afl_mean_worker_loss": "mean of the workers' test losses at the last evaluation",
    "afl_smooth_worst_loss": "smooth worst test loss at the last evaluation, at most ln(m)/50 above the "
    "highest; only with privacy.losses: hidden, which has no loss, accuracy or dual weight by worker",
    "afl_best_worst_worker_accuracy": "highest worst-worker accuracy of all evaluations",
    "afl_worker_value{worker,metric,better}": "of each worker at the last evaluation, of the metric that "
    "ranks (evaluation.rank_by); better is higher or lower",
    "afl_worst_worker_value{metric,better}": "the worst worker's of it at the last evaluation",
    "afl_mean_worker_value{metric,better}": "its mean over the workers at the last evaluation",
    "afl_best_worst_worker_value{metric,better}": "the worst worker's of it at the best evaluation",
    "afl_worker_epsilon{worker}": "privacy loss of each record of a worker at the last evaluation, at the "
    "run's delta; only with privacy.records",
    "afl_uplink_residual_norm{worker}": "Euclidean norm of each worker's residual at the last evaluation; "
    "where one is kept, and not with privacy.secure_aggregation",
    "afl_downlink_residual_norm": "Euclidean norm of the server's residual at this process's last "
    "evaluation; where one is kept",
    "afl_integer_bits{direction}": "bits of a value in the last closed round, as sent; of integers",
    "afl_integer_zero_ratio": "share of the last closed round's integers that are 0, as they were rounded; "
    "of the broadcast update's where the workers' are masked or float32",
    "afl_integer_limit_ratio": "share of them that are the largest of their bits: clipped, or just not",
    "afl_grid_smallest_exponent": "s of the finest step 2^s of the last closed round's grid",
    "afl_grid_largest_exponent": "s of its coarsest step",
    "afl_wire_bytes_total{direction,kind}": "bytes of gRPC messages with their 5-byte prefixes, by "
    "direction and kind",
    "afl_payload_bytes_total{direction,part}": "the same bytes by what they are; the parts sum to the wire "
    "bytes",
    "afl_float_equivalents_total{direction}": "what the paper's accounting charges, in floats, for each "
    "worker",
    "afl_frames_total{direction}": "gRPC messages",
    "afl_sessions": "open sessions",
    "afl_sessions_opened_total": "sessions ever opened",
    "afl_refused_sessions_total": "sessions refused",
    "afl_strangers": "connections without a session",
    "afl_strangers_cut_total": "connections without a session that this process of the server has cut: they "
    "had their time, or left workers too little room",
    "afl_server_starts_total": "processes of the server that have run this run",
    "afl_replayed_steps_total": "closed steps that a restarted server has repeated from its log",
    "afl_worker_restarts_total": "workers that came back as another process",
    "afl_reconnections_total": "sessions that resumed an earlier one of the same process",
    "afl_refused_reports_total": "reports that were duplicate, late or refused",
    "afl_late_reports_total": "reports that came after their step was closed, and were put back by their "
    "worker",
    "afl_absent_reports_total": "reports that steps were closed without: late, or with nothing finite",
    "afl_worker_failures_total": "failures that workers reported",
    "afl_lost_residuals_total": "workers that came back without their uplink residual",
    "afl_digest_mismatches_total": "model copies that differed from the server's and were replaced",
    "afl_round_restarts_total": "rounds whose sum had to begin again",
    "afl_waiting_bytes": "payload bytes held for workers whose turn in the sum has not come",
    "afl_worker_incidents_total{worker,incident}": "what has happened to each worker since this process of "
    "the server began: absent, non_finite, failure, restart, lost_residual, large_update, capped_loss, "
    "high_loss or digest_mismatch",
    "afl_worker_quarantined{worker}": "1 for a worker that the operator has put into quarantine, else 0",
    "afl_disk_free_bytes": "free bytes of the run directory's file system",
    "afl_disk_size_bytes": "size of the run directory's file system",
    "afl_certificate_expiry_seconds": "when the server's certificate expires, in Unix time; with TLS only",
    "afl_page_certificate_expiry_seconds": "when the certificate of server.http expires, in Unix time; with "
    "server.http_certificate only",
    "afl_worker_certificate_expiry_seconds{worker}": "when the certificate of each worker's session "
    "expires, in Unix time; with client certificates only",
}


_OF_EACH_WORKER: Final = (
    "afl_dual_weight",
    "afl_train_loss",
    "afl_worker_loss",
    "afl_worker_accuracy",
    "afl_worker_value",
)
"""What is not known where losses are hidden."""


FAMILIES = families(_MEANINGS)


def make_registry(
    snapshot: Callable[[], Snapshot],
    certificate_expiry: Callable[[], float | None],
    page_certificate_expiry: Callable[[], float | None],
    strangers: Callable[[], Strangers],
) -> CollectorRegistry:
    """The run's metrics, from its snapshot at each scrape."""

    def values() -> dict[str, Value]:
        met = strangers()
        return {
            **_values(snapshot()),
            "afl_certificate_expiry_seconds": certificate_expiry(),
            "afl_page_certificate_expiry_seconds": page_certificate_expiry(),
            "afl_strangers": met.now,
            "afl_strangers_cut_total": met.cut,
        }

    return registry_of(FAMILIES, values)


def _labelled(by: Ranked, value: float | None) -> Value:
    return None if value is None else {(by.metric, by.better): value}


def _values(s: Snapshot) -> dict[str, Value]:
    run, step, counters, evaluation = s.run, s.step, s.counters, s.evaluation
    missing, awaited = set(s.missing), set(step.awaited)
    ways = ((Direction.UPLINK, counters.uplink), (Direction.DOWNLINK, counters.downlink))
    values: dict[str, Value] = {
        "afl_run_info": {(run.run_id, run.algorithm, run.task): 1},
        "afl_run_state": {(state,): state == state_of(s) for state in STATES},
        "afl_round": step.round,
        "afl_synchronization": step.synchronization,
        "afl_rounds": run.rounds,
        "afl_workers": run.workers,
        "afl_workers_ready": run.workers - len(s.missing),
        "afl_worker_ready": [int(worker not in missing) for worker in range(run.workers)],
        "afl_site_info": {(str(worker), name): 1 for worker, name in sorted(s.names.items())} or None,
        "afl_workers_missing_reports": len(step.awaited),
        "afl_worker_awaited": [int(worker in awaited) for worker in range(run.workers)],
        "afl_round_seconds": s.round_seconds,
        "afl_open_step_seconds": time.monotonic() - step.opened_at,
        "afl_step_seconds": {(kind.name.lower(),): seconds for kind, seconds in s.step_seconds.items()},
        "afl_report_seconds": s.report_seconds,
        "afl_outcome_seconds": s.outcome_seconds,
        "afl_dual_weight": s.dual_weights.tolist(),
        "afl_train_loss": None if s.last_round is None else s.last_round.losses.tolist(),
        "afl_mean_train_loss": None if s.last_round is None else train_loss_of(s.last_round),
        "afl_best_worst_worker_accuracy": None if s.best is None else s.best.worst_accuracy,
        "afl_wire_bytes_total": {(way, kind): count.wire[kind] for way, count in ways for kind in Traffic},
        "afl_payload_bytes_total": {(way, part): count.parts[part] for way, count in ways for part in Part},
        "afl_float_equivalents_total": {(way,): count.float_equivalents for way, count in ways},
        "afl_frames_total": {(way,): count.frames for way, count in ways},
        "afl_sessions": s.sessions,
        "afl_sessions_opened_total": counters.sessions,
        "afl_refused_sessions_total": counters.refused,
        "afl_server_starts_total": counters.starts,
        "afl_replayed_steps_total": counters.replayed_steps,
        "afl_worker_restarts_total": counters.worker_restarts,
        "afl_reconnections_total": counters.reconnections,
        "afl_refused_reports_total": counters.refused_reports,
        "afl_late_reports_total": counters.late_reports,
        "afl_absent_reports_total": counters.absent_reports,
        "afl_worker_failures_total": counters.failures,
        "afl_lost_residuals_total": counters.lost_residuals,
        "afl_digest_mismatches_total": counters.digest_mismatches,
        "afl_round_restarts_total": s.sum_restarts,
        "afl_waiting_bytes": step.waiting_bytes,
        "afl_worker_incidents_total": {
            (str(worker), incident): count
            for incident, counts in s.incidents.items()
            for worker, count in enumerate(counts)
        },
        "afl_worker_quarantined": [int(worker in s.quarantined) for worker in range(run.workers)],
        # Left out where no session has one.
        "afl_worker_certificate_expiry_seconds": {
            (str(worker),): session.certificate_expiry
            for worker, session in sorted(s.connections.items())
            if session.certificate_expiry is not None
        }
        or None,
    }
    if run.restart_length:
        values["afl_block"] = run.restart_length
        values["afl_dual_restarts_total"] = s.updates_applied // run.restart_length
    if s.best is not None:
        best = ranked(vars(s.best))
        values["afl_best_worst_worker_value"] = _labelled(best, best.worst)
    if evaluation is not None and s.last is not None:
        values["afl_worker_loss"] = [entry.get("loss", math.nan) for entry in evaluation.metrics]
        values["afl_max_worker_loss"] = s.last.max_loss
        values["afl_smooth_worst_loss"] = s.last.smooth_worst_loss
        values["afl_mean_worker_loss"] = s.last.mean_loss
        values["afl_mean_worker_accuracy"] = s.last.mean_accuracy
        by = ranked(vars(s.last))
        values["afl_worker_value"] = {
            (str(worker), by.metric, by.better): entry[by.metric]
            for worker, entry in enumerate(evaluation.metrics)
            if by.metric in entry
        }
        values["afl_worst_worker_value"] = _labelled(by, by.worst)
        values["afl_mean_worker_value"] = _labelled(by, by.mean)
        values["afl_downlink_residual_norm"] = s.residual_norm
        values["afl_worker_epsilon"] = {
            (str(worker),): entry[PRIVACY_EPSILON]
            for worker, entry in enumerate(evaluation.metrics)
            if PRIVACY_EPSILON in entry
        } or None
        if s.last.worst_accuracy is not None:
            values["afl_worker_accuracy"] = [entry.get("accuracy", math.nan) for entry in evaluation.metrics]
            values["afl_worst_worker_accuracy"] = s.last.worst_accuracy
        if run.keeps_residuals:
            values["afl_uplink_residual_norm"] = evaluation.residual_norms or None
    if run.hides_losses:
        values.update(dict.fromkeys(_OF_EACH_WORKER))
    if s.last_round is not None and (integers := s.last_round.integers) is not None:
        values["afl_integer_bits"] = {
            (way,): bits
            for way, bits in (
                (Direction.UPLINK, integers.uplink_bits),
                (Direction.DOWNLINK, integers.downlink_bits),
            )
            if bits is not None
        }
        values["afl_integer_zero_ratio"] = integers.zeros
        values["afl_integer_limit_ratio"] = integers.at_limit
        values["afl_grid_smallest_exponent"] = integers.smallest_exponent
        values["afl_grid_largest_exponent"] = integers.largest_exponent
    # A directory that is gone: the run ends by itself, and says so.
    with contextlib.suppress(OSError):
        disk = shutil.disk_usage(run.directory)
        values |= {"afl_disk_free_bytes": disk.free, "afl_disk_size_bytes": disk.total}
    return values
