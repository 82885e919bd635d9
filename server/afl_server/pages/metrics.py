"""Prometheus metrics, computed from a snapshot of the run when they are scraped."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from afl.wire.accounting import Direction, Part, Traffic
from afl_server.federation.snapshot import Snapshot
from afl_server.pages.status import STATES, state_of

DOCUMENTATION = {
    "afl_run_info": "1, labelled with the run's id, algorithm and task",
    "afl_run_state": "1 for the state that the run is in, 0 for the others",
    "afl_round": "the open update round",
    "afl_synchronization": "the open synchronization round; not the update round if workers take local steps",
    "afl_rounds": "T, the update rounds of the run",
    "afl_workers": "m, the workers of the run",
    "afl_workers_ready": "workers with a session that is ready",
    "afl_worker_ready": "1 for a worker with a session that is ready, else 0",
    "afl_workers_missing_reports": "workers whose report the open step waits for",
    "afl_worker_awaited": "1 for a worker whose report the open step waits for, else 0",
    "afl_round_seconds": "duration of the last closed round",
    "afl_open_step_seconds": "how long the open step has been open",
    "afl_step_seconds": "how long the last closed step of each kind was open",
    "afl_report_seconds": "how long after its step was opened each worker's last report was complete",
    "afl_outcome_seconds": "how long it took to make the last closed step's outcome durable",
    "afl_dual_weight": "q, the dual weight of each worker in the open round",
    "afl_block": "B, the update rounds between two restarts of the dual weights; afl-br and afl-com only",
    "afl_dual_restarts": "restarts of the dual weights; afl-br and afl-com only",
    "afl_train_loss": "minibatch loss of each worker in the last closed round",
    "afl_worker_accuracy": "test accuracy of each worker at the last evaluation",
    "afl_worker_loss": "test loss of each worker at the last evaluation",
    "afl_worst_worker_accuracy": "lowest test accuracy at the last evaluation",
    "afl_max_worker_loss": "highest test loss at the last evaluation",
    "afl_best_worst_worker_accuracy": "highest worst-worker accuracy of all evaluations",
    "afl_uplink_residual_norm": "Euclidean norm of each worker's residual at the last evaluation; where "
    "one is kept",
    "afl_downlink_residual_norm": "Euclidean norm of the server's residual at this process's last "
    "evaluation; where one is kept",
    "afl_wire_bytes": "bytes of gRPC messages with their 5-byte prefixes, by direction and kind",
    "afl_payload_bytes": "the same bytes by what they are; the parts sum to the wire bytes",
    "afl_float_equivalents": "what the paper's accounting charges, in floats, for each worker",
    "afl_frames": "gRPC messages",
    "afl_sessions": "open sessions",
    "afl_sessions_opened": "sessions ever opened",
    "afl_refused_sessions": "sessions refused",
    "afl_server_starts": "processes of the server that have run this run",
    "afl_replayed_steps": "closed steps that a restarted server has repeated from its log",
    "afl_worker_restarts": "workers that came back as another process",
    "afl_reconnections": "sessions that resumed an earlier one of the same process",
    "afl_refused_reports": "reports that were duplicate, late or refused",
    "afl_late_reports": "reports that came after their step was closed, and were put back by their worker",
    "afl_absent_reports": "reports that steps were closed without: late, or with nothing finite",
    "afl_worker_failures": "failures that workers reported",
    "afl_lost_residuals": "workers that came back without their uplink residual",
    "afl_digest_mismatches": "model copies that differed from the server's and were replaced",
    "afl_round_restarts": "rounds whose sum had to begin again",
    "afl_waiting_bytes": "payload bytes held for workers whose turn in the sum has not come",
    "afl_worker_incidents": "what has happened to each worker since this process of the server began: "
    "absent, non_finite, failure, restart, lost_residual or digest_mismatch",
    "afl_disk_free_bytes": "free bytes of the run directory's file system",
    "afl_disk_size_bytes": "size of the run directory's file system",
    "afl_certificate_expiry_seconds": "when the server's certificate expires, in Unix time; with TLS only",
    "afl_worker_certificate_expiry_seconds": "when the certificate of each worker's session expires, in Unix "
    "time; with client certificates only",
}


class RunCollector(Collector):
    """All metrics of one run; counters appear with ``_total`` behind their name.

    Args:
        snapshot: the run now; called at each scrape.
        certificate_expiry: of the server's certificate, in Unix time; ``None`` in plaintext.
    """

    def __init__(
        self, snapshot: Callable[[], Snapshot], certificate_expiry: Callable[[], float | None]
    ) -> None:
        self._snapshot = snapshot
        self._certificate_expiry = certificate_expiry

    def collect(self) -> Iterable[Metric]:
        """The present state."""
        snapshot = self._snapshot()
        run, step, counters = snapshot.run, snapshot.step, snapshot.counters
        info = _gauge("afl_run_info", ["run_id", "algorithm", "task"])
        info.add_metric([run.run_id, run.algorithm, run.task], 1)
        yield info
        states, present = _gauge("afl_run_state", ["state"]), state_of(snapshot)
        for state in STATES:
            states.add_metric([state], state == present)
        yield states
        yield _one("afl_round", step.round)
        yield _one("afl_synchronization", step.synchronization)
        yield _one("afl_rounds", run.rounds)
        yield _one("afl_workers", run.workers)
        yield _one("afl_workers_ready", run.workers - len(snapshot.missing))
        yield _by_worker("afl_worker_ready", [1 - is_in for is_in in _marks(snapshot.missing, run.workers)])
        yield _one("afl_workers_missing_reports", len(step.awaited))
        yield _by_worker("afl_worker_awaited", _marks(step.awaited, run.workers))
        yield _one("afl_round_seconds", snapshot.round_seconds)
        yield _one("afl_open_step_seconds", time.monotonic() - step.opened_at)
        yield _one("afl_outcome_seconds", snapshot.outcome_seconds)
        steps = _gauge("afl_step_seconds", ["kind"])
        for kind, seconds in snapshot.step_seconds.items():
            steps.add_metric([kind.name.lower()], seconds)
        yield steps
        yield _by_worker("afl_report_seconds", snapshot.report_seconds)
        yield _by_worker("afl_dual_weight", snapshot.dual_weights.tolist())
        if run.restart_length:
            yield _one("afl_block", run.restart_length)
            yield _count("afl_dual_restarts", snapshot.updates_applied // run.restart_length)
        if snapshot.last_round is not None:
            yield _by_worker("afl_train_loss", snapshot.last_round.losses.tolist())
        yield from _evaluations(snapshot)
        yield from _bytes(snapshot)
        yield _one("afl_sessions", snapshot.sessions)
        yield _one("afl_waiting_bytes", step.waiting_bytes)
        yield from _incidents(snapshot)
        yield from self._certificates(snapshot)
        yield from _disk(snapshot)
        yield _count("afl_sessions_opened", counters.sessions)
        yield _count("afl_refused_sessions", counters.refused)
        yield _count("afl_server_starts", counters.starts)
        yield _count("afl_replayed_steps", counters.replayed_steps)
        yield _count("afl_worker_restarts", counters.worker_restarts)
        yield _count("afl_reconnections", counters.reconnections)
        yield _count("afl_refused_reports", counters.refused_reports)
        yield _count("afl_late_reports", counters.late_reports)
        yield _count("afl_absent_reports", counters.absent_reports)
        yield _count("afl_worker_failures", counters.failures)
        yield _count("afl_lost_residuals", counters.lost_residuals)
        yield _count("afl_digest_mismatches", counters.digest_mismatches)
        yield _count("afl_round_restarts", snapshot.sum_restarts)

    def _certificates(self, snapshot: Snapshot) -> Iterator[Metric]:
        expiry = self._certificate_expiry()
        if expiry is not None:
            yield _one("afl_certificate_expiry_seconds", expiry)
        family = _gauge("afl_worker_certificate_expiry_seconds", ["worker"])
        for worker, connection in sorted(snapshot.connections.items()):
            if connection.certificate_expiry is not None:
                family.add_metric([str(worker)], connection.certificate_expiry)
        if family.samples:
            yield family


def make_registry(collector: Collector) -> CollectorRegistry:
    """A registry with the run's metrics, and the process's own as prometheus_client names them."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


def _evaluations(snapshot: Snapshot) -> Iterator[Metric]:
    if snapshot.evaluation is None or snapshot.last is None:
        return
    metrics = snapshot.evaluation.metrics
    yield _by_worker("afl_worker_loss", [entry.get("loss", math.nan) for entry in metrics])
    yield _one("afl_max_worker_loss", snapshot.last.max_loss)
    worst = snapshot.last.worst_accuracy
    if worst is not None:
        yield _by_worker("afl_worker_accuracy", [entry.get("accuracy", math.nan) for entry in metrics])
        yield _one("afl_worst_worker_accuracy", worst)
    if snapshot.run.keeps_residuals:
        yield _by_worker("afl_uplink_residual_norm", snapshot.evaluation.residual_norms)
    if snapshot.residual_norm is not None:
        yield _one("afl_downlink_residual_norm", snapshot.residual_norm)
    if snapshot.best is not None and snapshot.best.worst_accuracy is not None:
        yield _one("afl_best_worst_worker_accuracy", snapshot.best.worst_accuracy)


def _incidents(snapshot: Snapshot) -> Iterator[Metric]:
    family = _counter("afl_worker_incidents", ["worker", "incident"])
    for incident, counts in snapshot.incidents.items():
        for worker, count in enumerate(counts):
            family.add_metric([str(worker), incident], count)
    yield family


def _disk(snapshot: Snapshot) -> Iterator[Metric]:
    try:
        disk = shutil.disk_usage(snapshot.run.directory)
    except OSError:
        # It is gone: the run ends by itself, and says so.
        return
    yield _one("afl_disk_free_bytes", disk.free)
    yield _one("afl_disk_size_bytes", disk.total)


def _bytes(snapshot: Snapshot) -> Iterator[Metric]:
    wire = _counter("afl_wire_bytes", ["direction", "kind"])
    parts = _counter("afl_payload_bytes", ["direction", "part"])
    floats = _counter("afl_float_equivalents", ["direction"])
    frames = _counter("afl_frames", ["direction"])
    counters = snapshot.counters
    for direction, count in ((Direction.UPLINK, counters.uplink), (Direction.DOWNLINK, counters.downlink)):
        for kind in Traffic:
            wire.add_metric([direction, kind], count.wire[kind])
        for part in Part:
            parts.add_metric([direction, part], count.parts[part])
        floats.add_metric([direction], count.float_equivalents)
        frames.add_metric([direction], count.frames)
    yield from (wire, parts, floats, frames)


def _gauge(name: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, DOCUMENTATION[name], labels=labels)


def _counter(name: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(name, DOCUMENTATION[name], labels=labels)


def _one(name: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, DOCUMENTATION[name], value=value)


def _count(name: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, DOCUMENTATION[name], value=value)


def _marks(workers: Iterable[int], count: int) -> list[int]:
    """1 at the place of each worker, of ``count``."""
    marks = [0] * count
    for worker in workers:
        marks[worker] = 1
    return marks


def _by_worker(name: str, values: Sequence[float]) -> GaugeMetricFamily:
    family = _gauge(name, ["worker"])
    for worker, value in enumerate(values):
        family.add_metric([str(worker)], value)
    return family
