"""What the daemons log: one class an event, which is all that an event's name and fields are defined by.

With names of sites, a line that has ``worker`` has ``site`` beside it.

An event goes to a logger as what a line says beside its message::

    LOG.info("%s ready", label, extra=WorkerReady(peer=peer, workers=workers).extra)

Names and fields stay as they are from version to version; the message is for people and may change. A field
is there in every line of its event, ``null`` where the event has no such thing. docs/reference/events.md has
the table that is made from this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, dataclass_transform, get_type_hints

EVENTS: dict[str, type[Event]] = {}
"""Every event by its name."""

Code = Annotated[int, "the exit code"]
Epoch = Annotated[int, "which keys of the run's workers are due, counted from 1"]
File = Annotated[str, "the file"]
Peer = Annotated[str, "the address it comes from"]
Reason = Annotated[str, "why"]
LeftOut = Annotated[int, "similar lines left out since the last one: of many, one a second is written"]
RunId = Annotated[str, "the run's id"]
SynchronizationRound = Annotated[int, "the synchronization round"]
ToldRounds = Annotated[int, "the rounds that it got in this process"]
TrackerName = Annotated[str, "as in run.trackers"]
Worker = Annotated[int, "the worker's id"]
Workers = Annotated[Sequence[int], "the workers' ids"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happens; a subclass, which is a frozen dataclass too, says what in its docstring.

    Its name is the event's in CamelCase, its annotations are the fields of the event's line.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        assert cls.name not in EVENTS, cls.name
        if not cls.__name__.startswith("_"):
            EVENTS[cls.name] = cls

    @property
    def extra(self) -> dict[str, Any]:
        """What a logger takes as ``extra``: the name under ``event``, and the fields."""
        return {"event": self.name, **{entry.name: getattr(self, entry.name) for entry in fields(self)}}

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What each field is, by its name."""
        hints = get_type_hints(cls, include_extras=True)
        return {entry.name: " ".join(hints[entry.name].__metadata__) for entry in fields(cls)}


class _OfPeer(Event):
    peer: Peer
    workers: Workers


class _OfWorker(Event):
    worker: Worker


class _OfReport(_OfWorker):
    round: SynchronizationRound


class _OfFile(Event):
    file: File


# The server's life.
class Listening(Event):
    """The server accepts workers."""

    run_id: RunId
    port: Annotated[int, "of gRPC"]
    http_port: Annotated[int | None, "of /status, /metrics and the probes; null without them"]
    version: Annotated[str, "of afl"]
    dim: Annotated[int, "d, the model's trainable parameters"]
    directory: Annotated[str, "the run directory"]


class InitialModel(Event):
    """A run begins with the values of a file (``run.initial_model``)."""

    file: Annotated[str, "as configured"]
    digest: Annotated[str, "of its tensors, 32 hexadecimal digits, as `afl inspect` shows it"]


class Resumed(Event):
    """A server has read a run's state and resumes the run."""

    run_id: RunId
    round: SynchronizationRound


class AccessResumed(Event):
    """Whom a resumed server lets in, by which keys and files; a warning if its state has others, which
    somebody has changed since it was written."""

    changed: Annotated[Sequence[str], "the keys that have changed"]


class VersionChanged(Event):
    """A server of another version of afl than the one before it resumes the run."""

    before: Annotated[str, "the version before; unknown where none was written down"]
    version: Annotated[str, "of afl, from here on"]
    round: Annotated[int, "the last update round that was closed before"]


class ArithmeticChanged(Event):
    """A server that computes otherwise than the one before it resumes the run, which does not come to the
    result that it would have had."""

    before: Annotated[str, "the version of afl of the server before"]
    round: Annotated[int, "the last update round that was closed before"]


class Stopping(Event):
    """A server that was asked to stop, or has given up waiting for workers, ends after its open step."""

    reason: Reason


class RunAborted(Event):
    """The run ends before its last round."""

    code: Code
    reason: Reason


class RunOver(Event):
    """The server ends: the run is over, or can be resumed."""

    code: Code
    summary: Annotated[Mapping[str, Any] | None, "what summary.json holds; null if it could not be written"]


class RunComplete(Event):
    """A server that stays (--stay) found its run complete."""


class Staying(Event):
    """A daemon that stays (--stay) has nothing left to do, and waits to be stopped."""


class AwaitingNextRun(Event):
    """A worker that takes part in one run after the other (--again) waits for the next one."""

    run_id: RunId


class PageFailed(Event):
    """A request over HTTP failed because of a bug; its traceback follows."""


class TracesOff(Event):
    """The environment asks for OpenTelemetry traces (OTEL_...), which cannot be had; the run does without."""

    reason: Reason


class TrackerFailed(Event):
    """A tracker failed for the first time in this process; the run continues, and later rounds are sent."""

    tracker: TrackerName


class TrackerLeft(Event):
    """A tracker did not finish at the end and is abandoned."""

    tracker: TrackerName
    rounds: ToldRounds


class TrackerEnded(Event):
    """A tracker is done with the run, or with this process's part of it."""

    tracker: TrackerName
    rounds: ToldRounds
    failures: Annotated[int, "how often it has failed in this process"]


class CanGoOn(Event):
    """The run is not over: the same command, or --resume, continues it."""

    directory: Annotated[str, "the run directory"]


# Sessions.
class WorkerReady(_OfPeer):
    """A worker process has joined and takes steps."""


class Refused(Event):
    """A peer may not join, or may not stay."""

    peer: Peer
    workers: Annotated[Sequence[int], "the ids it had joined with; none before that"]
    reason: Reason
    left_out: LeftOut


class SessionEnded(_OfPeer):
    """The stream of a process that had joined has ended, in whatever way."""


class SessionBroke(_OfPeer):
    """A bug in the server ended one session, at its first time with its traceback; the worker reconnects."""


class Goodbye(_OfPeer):
    """A worker process has said goodbye."""

    reason: Reason


class PeerTimeout(_OfPeer):
    """Nothing came from a process for server.peer_timeout, and its session is ended."""

    seconds: Annotated[float, "how long nothing arrived"]


class NotReading(Event):
    """A peer does not read what it is sent, and its connection is cut without a goodbye."""

    peer: Peer
    workers: Annotated[Sequence[int], "the ids it had joined with; none before that"]
    left_out: LeftOut


class StrangersCut(Event):
    """Connections without a session were cut: they had their time, or left workers too little room."""

    connections: Annotated[int, "cut since the last such line; at most one in ten seconds is written"]
    left: Annotated[int, "connections without a session that are left"]


class KeyEpoch(_OfPeer):
    """A process came with keys that are not those of before, so that all workers make new ones."""

    epoch: Epoch


class Replaced(_OfPeer):
    """A process did not answer when another came with one of its ids, and has lost them."""


class LostResidual(_OfWorker):
    """A worker came back without the uplink residual that it had."""


class WorkerAhead(_OfReport):
    """A worker has reported of a round that the server, put back to an old state, has yet to open."""


class WorkerFailed(_OfWorker):
    """A worker could not do a step; the message ends with its traceback."""

    round: Annotated[int | None, "the synchronization round; null before the first"]


# Rounds.
class Evaluation(Event):
    """All workers have evaluated the model."""

    round: Annotated[int, "the update rounds that led to the model"]
    worst_worker: Annotated[
        int | None,
        "of the worst value of evaluation.rank_by; without it of lowest accuracy, or of highest loss where "
        "there is no accuracy; null if losses are hidden",
    ]
    worst_site: Annotated[str | None, "its site's name; null without one"]
    worst_accuracy: Annotated[
        float | None, "the lowest accuracy; null where the task has none, or losses are hidden"
    ]
    max_loss: Annotated[float | None, "the highest loss; null if losses are hidden"]
    smooth_worst_loss: Annotated[float | None, "in its place if losses are hidden, else null"]
    rank_by: Annotated[str, "the metric that ranks"]
    worst_value: Annotated[float | None, "the worst worker's of it; null if it is hidden"]


class ConfigurationAdvice(Event):
    """The configuration is allowed and probably not what is meant; told at each start."""

    key: Annotated[str, "the key whose value it is about"]


class NotRanked(Event):
    """No worker reports the metric of evaluation.rank_by: accuracy ranks, or loss; told once."""

    rank_by: Annotated[str, "the metric"]
    metrics: Annotated[Sequence[str], "those that are reported"]


class SiteWarning(Event):
    """A site is served worst and weighted below even, or its loss rises while its training loss falls."""

    round: Annotated[int, "the update rounds that led to the model"]


class Absent(Event):
    """Steps are closed without other workers than before (faults.stragglers, faults.non_finite)."""

    workers: Annotated[Sequence[int], "the absent workers; empty when all are present again"]


class NonFinite(_OfReport):
    """A worker's loss, gradient or metric was not finite, and the step is closed without its report."""


class Quarantined(Event):
    """The operator has put other workers into quarantine than before: steps are closed without them."""

    workers: Annotated[Sequence[int], "the workers in quarantine; empty when there are none any more"]


class QuarantineUnusable(Event):
    """The file quarantine in the run directory cannot be followed; who was in quarantine stays so."""

    reason: Reason


class UpdateTooLarge(_OfReport):
    """A worker's update was far larger than the others', and the step is closed without it."""

    norm: Annotated[float, "of the update"]
    limit: Annotated[float, "the largest that would have counted"]


class LossCapped(_OfReport):
    """A worker's loss was beyond faults.loss_cap, and counts as that; told once a worker and process."""

    loss: Annotated[float, "as it was reported"]


class LossFarAbove(Event):
    """Other workers than before have a training loss far above all rounds' medians (ten times)."""

    workers: Annotated[Sequence[int], "these workers; empty when there are none any more"]
    round: SynchronizationRound


class RoundRestarted(_OfWorker):
    """A worker died in the middle of a report that was partly summed, or lost its keys: the sum restarts."""


class DigestMismatch(_OfWorker):
    """A worker's model differs from the server's; unless the run is over, the worker is sent the model."""

    round: Annotated[int, "the update rounds that led to the model"]


class StepFailed(Event):
    """A bug in the server, with its traceback (it ends with code 1), or memory ran out there (code 12)."""

    round: SynchronizationRound


# The run directory.
class DiskFailed(Event):
    """A model or the last checkpoint could not be written."""


class DescriptorsShort(Event):
    """A file cannot be opened: no file descriptor is free; the server tries again until one is."""


class CheckpointFailed(Event):
    """A checkpoint could not be written; the log continues, and has all that the checkpoint would have."""


class CheckpointDamaged(_OfFile):
    """A checkpoint cannot be used; the one before it is taken."""


class LogCut(_OfFile):
    """The last outcome was not written completely; its step is open again."""


class RoundsLost(Event):
    """Outcomes in the state folder are missing or damaged; the run resumes from before them."""

    rounds: Annotated[int, "the synchronization rounds that metrics.jsonl knows of and that are lost"]


class MetricsLost(_OfFile):
    """metrics.jsonl is shorter than the state says: lines of earlier rounds are lost."""


class SummaryDamaged(_OfFile):
    """summary.json cannot be read; the state says how far the run is."""


class VersionsDamaged(_OfFile):
    """versions.json cannot be read, and is left as it is: nothing is said of other versions or arithmetic."""


# Certificates and tokens.
class CertificateExpires(_OfFile):
    """The daemon's own certificate expires within two weeks, has expired, or is not valid yet."""

    expires: Annotated[float, "when, in Unix time"]


class SecretIsReadable(_OfFile):
    """A file with a key or token can be read by every user of the machine."""


class PeersUnchecked(Event):
    """A worker believes any key that the server hands it as its peers' (--trust-server-keys)."""


class Reloaded(Event):
    """Certificates or tokens have been replaced and are used from now on."""

    what: Annotated[str, "the key: server.tls, server.tls.revoked, server.tokens or server.http_token"]


class ReloadFailed(Event):
    """Certificates or tokens have been replaced and cannot be used; those before stay in use."""

    what: Annotated[str, "the key: server.tls, server.tls.revoked, server.tokens or server.http_token"]


# The worker's life.
class Joined(Event):
    """The task, its data and its model are built, and the worker takes part."""

    run_id: RunId
    device: Annotated[str, "the device: cpu, cuda:0, ..."]


class KeysAgreed(Event):
    """The roster of all workers' keys is right: this process's messages are masked from here on."""

    epoch: Epoch


class BegunAnew(_OfWorker):
    """Keys are other ones: what earlier steps have left with the worker (its residual) is forgotten."""

    epoch: Epoch


class JoinedAgain(Event):
    """The same process is welcomed again after a cut."""

    run_id: RunId
    round: SynchronizationRound
    kept: Annotated[int, "bytes of reports, and of a step, that had come in part and are not sent again"]


class Reconnecting(Event):
    """There is no session with the server; the worker tries again soon, and says so ever more rarely: of the
    first, second, fourth, eighth try and so on, and where the reason is another."""

    seconds: Annotated[float, "until then, at most"]
    reason: Reason
    tries: Annotated[int, "failed since the worker last got further"]


class CutShort(Event):
    """One connection after the other was cut in the middle of a message: something limits size or time."""

    connections: Annotated[int, "in a row"]


class ReportAnswered(_OfReport):
    """A report was a duplicate, late or refused."""

    status: Annotated[str, "duplicate, late or refused"]


class PutBack(_OfReport):
    """A report was late; what it carried is in the residual and sent later."""


class JournalRead(_OfWorker):
    """A worker resumes from its journal."""

    round: Annotated[int, "the synchronization round of the report in it"]


class PrivacyPlanned(_OfWorker):
    """What the run's rounds will cost each record of a worker (privacy.records)."""

    epsilon: Annotated[float, "at the last round"]
    delta: Annotated[float, "that it is stated for"]
    noise: Annotated[float, "on sums of gradients, in units of clip"]
    loss_noise: Annotated[float, "on sums of losses, in units of loss_clip"]


class PrivacySpent(_OfWorker):
    """What a worker's steps have cost each of its records so far, at an evaluation."""

    round: Annotated[int, "the synchronization round of the evaluation"]
    epsilon: Annotated[float, "at the run's delta"]


class PrivacyCounted(_OfWorker):
    """A journal lacks steps that were taken; they count as spent."""

    steps: Annotated[int, "so many"]


class JournalDamaged(_OfWorker):
    """An entry of a journal is incomplete; the one before it is used, if there is one."""


class AuditOpened(_OfFile):
    """What leaves the site is logged from here on (audit, in a policy)."""

    lines: Annotated[int, "that are there"]
    hash: Annotated[str, "of the last of them, SHA-256"]


class AuditCut(_OfFile):
    """The last line of an audit log was not written to its end, and is cut off."""


class Timings(Event):
    """Where the process's time went, at the end of the run; in seconds of wall-clock and of CPU time."""

    steps: Annotated[int, "steps answered"]
    compute_wall: Annotated[float, "losses, gradients and evaluations"]
    compute_cpu: Annotated[float, "the same"]
    codec_wall: Annotated[float, "error feedback, compression and the model's step"]
    codec_cpu: Annotated[float, "the same"]
    prepare_wall: Annotated[float, "the next round's randomness"]
    prepare_cpu: Annotated[float, "the same"]
    wait_wall: Annotated[float, "waiting for the server and, through it, for the other workers"]
    wait_cpu: Annotated[float, "the same"]


class Ended(Event):
    """The worker process ends."""

    code: Code
