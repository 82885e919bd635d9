"""A worker's pages for probes and Prometheus."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from afl._version import __version__
from afl.config.address import Address
from afl.daemon.hosts import OwnNames
from afl.daemon.http import OVER, Answer, Environ, HttpPages, text
from afl.daemon.metrics import Value, families, registry_of, scraped
from afl.paths import from_start
from afl.security.identity import WorkerIds
from afl_worker.options import WorkerOptions
from afl_worker.runtime import Runtime

STATES: Final = ("no session", "in session", "over")

FAMILIES = families(
    {
        "afl_site_process_info{ids,run_id,version}": "1, labelled with the ids that the process hosts, the "
        "run's id (empty before the first session) and the version of afl",
        "afl_site_state{state}": "1 for the state that the process is in, 0 for the others",
        "afl_site_round": "the synchronization round of the last step that the process has taken",
        "afl_site_rounds": "the synchronization rounds of the run",
        "afl_site_steps_total": "steps that the process has taken",
        "afl_site_seconds_total{phase}": "where the time went up to the last step: in the task's code "
        "(compute), in error feedback and coding (codec), in the next round's randomness (prepare), and "
        "waiting for the server and the other workers (wait)",
        "afl_site_bytes_total{direction}": "bytes of messages, uplink and downlink, without what gRPC and "
        "TLS add",
        "afl_site_sessions_total": "sessions that the server has welcomed",
        "afl_site_failed_tries": "tries to reach the server, one after the other, that have failed since the "
        "process last got further",
        "afl_site_residual_norm{worker}": "Euclidean norm of each hosted worker's residual at the last "
        "evaluation; where one is kept, and not with privacy.secure_aggregation",
        "afl_site_policy_rounds_left": "synchronization rounds that the hosted workers may still answer by "
        "the max_rounds of the site's policy; where it has one",
        "afl_site_disk_free_bytes": "free bytes of the journal's file system",
        "afl_site_disk_size_bytes": "size of the journal's file system",
        "afl_site_epsilon{worker}": "privacy loss of each record of a hosted worker so far, at the run's "
        "delta; only with privacy.records",
        "afl_site_certificate_expiry_seconds": "when the certificate of --certificate expires, in Unix time",
    }
)


class WorkerPages(HttpPages):
    """Says whether the process answers, whether it takes part, and how it does: /healthz, /readyz, /metrics.

    Nothing here depends on how long a step takes: the server ends the session of a worker that is silent.
    """

    def __init__(self, runtime: Runtime, options: WorkerOptions, address: Address) -> None:
        self._runtime = runtime
        self._options = options
        self._names = OwnNames(
            [address.host], "this worker is not known by the name in the request; ask by address"
        )
        self._registry = registry_of(FAMILIES, self._values)
        super().__init__(address, "--http")

    def answer(self, path: str, environ: Environ) -> Answer:
        """``/healthz``, ``/readyz`` or ``/metrics``."""
        if path == "/healthz":
            return text("200 OK", "ok\n")
        if path == "/metrics":
            return self._names.refusal(environ) or scraped(self._registry, environ)
        if path != "/readyz":
            return text("404 Not Found", "try /healthz, /readyz or /metrics\n")
        if self._runtime.is_over:
            return OVER
        if self._runtime.has_session:
            return text("200 OK", "ready\n")
        return text("503 Service Unavailable", "no session with the server\n")

    def _values(self) -> dict[str, Value]:
        progress = self._runtime.progress()
        in_session = "in session" if self._runtime.has_session else "no session"
        state = "over" if self._runtime.is_over else in_session
        ids = str(WorkerIds.of(self._options.workers))
        return {
            "afl_site_process_info": {(ids, progress.run_id, __version__): 1},
            "afl_site_state": {(each,): each == state for each in STATES},
            "afl_site_round": progress.round,
            "afl_site_rounds": progress.rounds,
            "afl_site_steps_total": progress.steps,
            "afl_site_seconds_total": {(phase,): spent for phase, spent in progress.seconds.items()},
            "afl_site_bytes_total": {
                ("uplink",): progress.sent_bytes,
                ("downlink",): progress.received_bytes,
            },
            "afl_site_sessions_total": progress.sessions,
            "afl_site_failed_tries": progress.failed_tries,
            "afl_site_residual_norm": {
                (str(worker),): norm for worker, norm in sorted(progress.residual_norms.items())
            }
            or None,
            "afl_site_policy_rounds_left": progress.policy_rounds_left,
            **_disk_of(self._options.journal),
            "afl_site_epsilon": {
                (str(worker),): epsilon for worker, epsilon in sorted(progress.epsilons.items())
            }
            or None,
            "afl_site_certificate_expiry_seconds": self._options.credentials.certificate_expiry,
        }


def _disk_of(folder: Path) -> dict[str, Value]:
    """Of a folder that may not have been made yet; nothing where the system does not say."""
    path = from_start(folder)
    try:
        disk = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists()))
    except OSError:
        return {}
    return {"afl_site_disk_free_bytes": disk.free, "afl_site_disk_size_bytes": disk.total}
