"""What leaves this process: allowed by the site's policy, and in the site's log before it goes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from afl.core.messages import NOWHERE, Kind, Payload, Position, Report
from afl.core.record_privacy import Account
from afl.daemon import events
from afl.errors import StorageError
from afl.paths import from_start
from afl.site.audit import AuditLog, Entry, digest_of
from afl.site.policy import SitePolicy
from afl.v1 import federation_pb2 as pb
from afl.wire.frames import position_of
from afl.wire.settings import RunSettings
from afl_worker.options import WorkerOptions

LOG = logging.getLogger("afl.worker")

_LATER = frozenset({"previous", "time", "again"})
"""What an entry has that is not the same when the same leaves again."""

NOT_LOGGED = "the site's audit log cannot be written"


class Departures:
    """The policy and the log of a worker process, over all its connections.

    Raises:
        StorageError: if the log cannot be used.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._policy: SitePolicy = options.policy
        self._run_id = ""
        self._local_steps, self._hides_losses = 1, False
        self.accounts: Mapping[int, Account] = {}
        """Of the hosted workers' records, once there is a run that protects them."""
        self._last: dict[tuple[str, str, tuple[int, ...]], Mapping[str, Any]] = {}
        """What each group of workers last sent of each kind, by run."""
        self._answers: Counter[tuple[str, str, int]] = Counter()
        """How many different answers a worker has sent of each kind, by run."""
        path = self._policy.limits.audit
        self._log = AuditLog(from_start(path), self._seen, self._cut) if path is not None else None
        if self._log is not None:
            opened = events.AuditOpened(file=str(path), lines=self._log.last.number, hash=self._log.last.hash)
            text = "%s: what leaves this site is logged after line %d (%s)"
            LOG.info(text, path, opened.lines, opened.hash, extra=opened.extra)

    def check(self, run_id: str, settings: RunSettings) -> None:
        """Raise PolicyError if a run of these settings is not allowed here."""
        run = settings.parameters
        self._run_id, self._local_steps, self._hides_losses = run_id, run.local_steps, run.hides_losses
        self._policy.check_run(settings, self._options.task or settings.task)

    def rounds_left(self) -> int | None:
        """Synchronization rounds of the run that the policy still lets these workers answer; ``None`` where
        it has no bound."""
        most = self._policy.most_answers(self._local_steps)
        kinds = (Kind.TRAIN.name.lower(), Kind.LOSS.name.lower())
        answered = [
            self._answers[self._run_id, kind, worker] for kind in kinds for worker in self._options.workers
        ]
        return None if most is None else max(0, most - max(answered))

    def check_server(self) -> None:
        """Raise PolicyError if the server, or an authority in the file as it now is, is not allowed."""
        credentials = self._options.credentials
        self._policy.check_server(self._options.server, credentials.read().authorities)

    def joined(self, settings: RunSettings) -> None:
        """Log that the process takes part in a run, and in what."""
        run = settings.parameters
        about = {
            "server": str(self._options.server),
            "task": self._options.task or settings.task,
            "task_options": dict(settings.task_options),
            "batch_size": settings.batch_size,
            "algorithm": run.name,
            "rounds": run.rounds,
            "of": run.workers,
            **({"records": asdict(run.records)} if run.records is not None else {}),
        }
        self._add("joined", self._options.workers, NOWHERE, (), about)

    def reported(self, kind: Kind, report: Report, payloads: Sequence[Payload]) -> None:
        """Log a report before it is sent, and count it.

        Raises:
            PolicyError: if it would be of a round too many.
            StorageError: if the log cannot be written.
        """
        told: dict[str, Any] = {}
        if not (kind is Kind.BUFFERS or report.missing or self._hides_losses):
            shares = list(report.of_each())
            told["losses"] = [share.loss for share in shares]
            told["examples"] = [share.examples for share in shares]
        if report.metrics:
            told["metrics"] = sorted(report.metrics)
        told |= {
            key: value for key in ("weight", "residual_norm", "missing") if (value := getattr(report, key))
        }
        self._add(kind.name.lower(), report.workers, report.position, payloads, told)

    def failed(self, told: pb.Failure) -> None:
        """Log what the server is told of a failure; what cannot be logged is not told."""
        text = (told.message + told.traceback).encode()
        about = {"bytes": len(text), "digest": digest_of([text])}
        try:
            self._add("failure", [told.worker], position_of(told.position), (), about)
        except StorageError:
            told.message, told.traceback = NOT_LOGGED, ""

    def _add(
        self,
        kind: str,
        workers: Sequence[int],
        position: Position,
        payloads: Sequence[Payload],
        told: Mapping[str, Any],
    ) -> None:
        is_logged = self._log is not None
        sections = [section for payload in payloads for section in payload.sections]
        entry = {
            "run": self._run_id,
            "workers": list(workers),
            "round": position.round,
            "phase": position.phase,
            "kind": kind,
            "bytes": sum(map(len, sections)),
            "digest": digest_of(sections) if is_logged and sections else None,
            "told": dict(told),
            "epsilon": max((self.accounts[w].epsilon for w in workers if w in self.accounts), default=None),
        }
        entry["again"] = self._last.get(_group(entry)) == _content(entry)
        if kind in {Kind.TRAIN.name.lower(), Kind.LOSS.name.lower()} and not entry["again"]:
            for worker in workers:
                rounds = self._answers[self._run_id, kind, worker] + 1
                self._policy.check_rounds(rounds, self._local_steps, worker)
        if self._log is not None:
            self._log.add(entry)
        else:
            self._seen(entry)

    def _cut(self, count: int) -> None:
        path = self._policy.limits.audit
        text = "%s: %d bytes of a last line are cut off that was never whole; what it would say was not sent"
        LOG.warning(text, path, count, extra=events.AuditCut(file=str(path)).extra)

    def _seen(self, entry: Entry) -> None:
        """Remember what has left, by this process or one before it."""
        if "workers" in entry and not entry["again"]:
            self._last[_group(entry)] = _content(entry)
            self._answers.update((entry["run"], entry["kind"], worker) for worker in entry["workers"])


def _group(entry: Entry) -> tuple[str, str, tuple[int, ...]]:
    return entry["run"], entry["kind"], tuple(entry["workers"])


def _content(entry: Entry) -> Mapping[str, Any]:
    return {key: value for key, value in entry.items() if key not in _LATER}
