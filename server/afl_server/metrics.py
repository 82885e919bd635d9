"""Prometheus metrics, computed from the run's state when they are scraped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from afl.wire.accounting import Direction, Part, Traffic
from afl_server.coordinator import Coordinator

DOCUMENTATION = {
    "afl_run_info": "1, labelled with the run's id, algorithm and task",
    "afl_round": "the open update round",
    "afl_synchronization": "the open synchronization round; not the same where workers take local steps",
    "afl_rounds": "T, the update rounds of the run",
    "afl_workers": "m, the workers of the run",
    "afl_workers_ready": "workers with a session that is ready",
    "afl_workers_missing_reports": "workers whose report the open step waits for",
    "afl_round_seconds": "duration of the last closed round",
    "afl_open_step_seconds": "how long the open step has been open",
    "afl_step_seconds": "how long the last closed step of each kind was open",
    "afl_report_seconds": "how long after its step was opened each worker's last report was complete",
    "afl_outcome_seconds": "how long it took to make the last closed step's outcome durable",
    "afl_dual_weight": "q, the dual weight of each worker in the open round",
    "afl_train_loss": "minibatch loss of each worker in the last closed round",
    "afl_worker_accuracy": "test accuracy of each worker at the last evaluation",
    "afl_worker_loss": "test loss of each worker at the last evaluation",
    "afl_worst_worker_accuracy": "lowest test accuracy at the last evaluation",
    "afl_max_worker_loss": "highest test loss at the last evaluation",
    "afl_best_worst_worker_accuracy": "highest worst-worker accuracy of all evaluations",
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
    "afl_certificate_expiry_seconds": "when the server's certificate expires, in Unix time; with TLS only",
}


class RunCollector(Collector):
    """All metrics of one run; counters appear with ``_total`` behind their name."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterable[Metric]:
        """The present state."""
        coordinator, engine = self._coordinator, self._coordinator.engine
        records, tallies, config = coordinator.records, coordinator.tallies, coordinator.config
        info = _gauge("afl_run_info", ["run_id", "algorithm", "task"])
        info.add_metric([coordinator.run_id, config.algorithm.name, config.task.name], 1)
        yield info
        yield _one("afl_round", engine.open_round)
        yield _one("afl_synchronization", engine.step.position.round)
        yield _one("afl_rounds", engine.rounds)
        yield _one("afl_workers", engine.workers)
        yield _one("afl_workers_ready", engine.workers - len(coordinator.roster.missing()))
        yield _one("afl_workers_missing_reports", len(engine.missing()))
        yield _one("afl_round_seconds", records.round_seconds)
        yield _one("afl_open_step_seconds", time.monotonic() - coordinator.step_opened_at)
        yield _one("afl_outcome_seconds", coordinator.outcome_seconds)
        steps = _gauge("afl_step_seconds", ["kind"])
        for kind, seconds in coordinator.step_seconds.items():
            steps.add_metric([kind.name.lower()], seconds)
        yield steps
        yield _by_worker("afl_report_seconds", coordinator.report_seconds)
        yield _by_worker("afl_dual_weight", engine.dual_weights.tolist())
        if records.round is not None:
            yield _by_worker("afl_train_loss", records.round.losses.tolist())
        yield from self._evaluations()
        yield from self._bytes()
        yield _one("afl_sessions", len(coordinator.roster))
        yield _one("afl_waiting_bytes", engine.collector.waiting_bytes)
        if coordinator.gate.expiry is not None:
            yield _one("afl_certificate_expiry_seconds", coordinator.gate.expiry)
        yield _count("afl_sessions_opened", tallies.sessions)
        yield _count("afl_refused_sessions", tallies.refused)
        yield _count("afl_server_starts", tallies.starts)
        yield _count("afl_replayed_steps", tallies.replayed_steps)
        yield _count("afl_worker_restarts", tallies.worker_restarts)
        yield _count("afl_reconnections", tallies.reconnections)
        yield _count("afl_refused_reports", tallies.refused_reports)
        yield _count("afl_late_reports", tallies.late_reports)
        yield _count("afl_absent_reports", tallies.absent_reports)
        yield _count("afl_worker_failures", tallies.failures)
        yield _count("afl_lost_residuals", tallies.lost_residuals)
        yield _count("afl_digest_mismatches", tallies.digest_mismatches)
        yield _count("afl_round_restarts", engine.restarts)

    def _evaluations(self) -> Iterator[Metric]:
        records = self._coordinator.records
        if records.last_evaluation is None:
            return
        metrics = records.last_evaluation.metrics
        yield _by_worker("afl_worker_loss", [entry.get("loss", math.nan) for entry in metrics])
        yield _one("afl_max_worker_loss", records.evaluations[-1].max_loss)
        worst = records.evaluations[-1].worst_accuracy
        if worst is not None:
            yield _by_worker("afl_worker_accuracy", [entry.get("accuracy", math.nan) for entry in metrics])
            yield _one("afl_worst_worker_accuracy", worst)
        if records.best is not None and records.best.worst_accuracy is not None:
            yield _one("afl_best_worst_worker_accuracy", records.best.worst_accuracy)

    def _bytes(self) -> Iterator[Metric]:
        wire = _counter("afl_wire_bytes", ["direction", "kind"])
        parts = _counter("afl_payload_bytes", ["direction", "part"])
        floats = _counter("afl_float_equivalents", ["direction"])
        frames = _counter("afl_frames", ["direction"])
        tallies = self._coordinator.tallies
        for direction, count in ((Direction.UPLINK, tallies.uplink), (Direction.DOWNLINK, tallies.downlink)):
            for kind in Traffic:
                wire.add_metric([direction, kind], count.wire[kind])
            for part in Part:
                parts.add_metric([direction, part], count.parts[part])
            floats.add_metric([direction], count.float_equivalents)
            frames.add_metric([direction], count.frames)
        yield from (wire, parts, floats, frames)


def make_registry(coordinator: Coordinator) -> CollectorRegistry:
    """A registry with the run's metrics and nothing else."""
    registry = CollectorRegistry()
    registry.register(RunCollector(coordinator))
    return registry


def _gauge(name: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, DOCUMENTATION[name], labels=labels)


def _counter(name: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(name, DOCUMENTATION[name], labels=labels)


def _one(name: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, DOCUMENTATION[name], value=value)


def _count(name: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, DOCUMENTATION[name], value=value)


def _by_worker(name: str, values: list[float]) -> GaugeMetricFamily:
    family = _gauge(name, ["worker"])
    for worker, value in enumerate(values):
        family.add_metric([str(worker)], value)
    return family
