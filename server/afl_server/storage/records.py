"""The run directory: the resolved configuration, metrics line by line, models, and a summary."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file

from afl._version import __version__
from afl.config import Config, dump_config
from afl.core.rounds.results import Evaluation, RoundSummary
from afl.daemon import events
from afl.errors import ConfigError, DataError, ExitCode, StorageError, cannot_begin, why_unwritten
from afl.names import Names
from afl.paths import kind_of, naming_paths, read_plain
from afl.runs.durable import OWNER_ONLY, own_folder, replacing, write_whole
from afl.runs.files import CONFIG_FILE, LINES, METRICS_FILE, MODEL_NAMES, SUMMARY_FILE, model_file
from afl.runs.metrics import RANK_KEYS, Ranked, hidden_figures, ranked
from afl.runs.shapes import check_values, damage_named
from afl.runs.sites import SiteTable
from afl.runs.versions import VERSIONS_FILE, Version, read_versions, shown_versions, write_versions
from afl.wire.accounting import WireCount
from afl_server.federation.broadcast import ModelCopy
from afl_server.federation.counters import Counters
from afl_server.federation.evaluation_summary import (
    EvaluationSummary,
    Ranking,
    evaluation_of_line,
    train_loss_of,
)
from afl_server.pages.history import Bucket, History

LOG = logging.getLogger("afl.server")


@dataclass
class RunRecords:
    """What is written of a run. Each method that writes raises a ``StorageError`` if it cannot.

    Attributes:
        ranking: of the evaluations so far; whoever closes one adds it.
        round: the last closed round.
        first_round: the first line of a round in the metrics.
        history: what the status page draws; ``None`` where nothing serves it.
        names: of sites, by worker.
        sites: how each has fared.
        versions: of afl that the run has had, in order; none where that cannot be read.
    """

    run_id: str
    directory: Path
    config: Config
    round: RoundSummary | None = None
    first_round: Mapping[str, Any] | None = None
    last_evaluation: Evaluation | None = None
    round_seconds: float = 0.0

    arithmetic: str = ""
    """Of this process, as :class:`Version` has it."""

    _file: TextIO | None = None
    _ahead: Sequence[Mapping[str, Any]] = ()
    """The lines that the metrics had beyond where they are resumed."""

    def __post_init__(self) -> None:
        self.ranking = Ranking(
            self.config.divergence_watch,
            self.config.evaluation.ranking,
            self.config.patience,
            self.config.algorithm.restart_length,
        )
        self.names: Names = self.config.names
        self.sites = SiteTable()
        self.versions = [Version(__version__, 0)]
        self.history = None if self.config.server.http is None else History(self.config.workers)

    # Beginning.

    @staticmethod
    def claim(directory: Path) -> None:
        """Make the directory, if it is not there.

        Raises:
            ConfigError: if it holds a run already, or cannot be made.
        """
        with _making(directory):
            own_folder(directory)
            taken = next((name for name in (CONFIG_FILE, METRICS_FILE) if (directory / name).exists()), None)
        if taken:
            raise ConfigError(
                f"run.directory: {directory} already holds a run ({taken} is there), and nothing is "
                "overwritten; name another directory: --set run.directory=runs/NEW"
            )

    @classmethod
    def create(cls, run_id: str, directory: Path, config: Config) -> RunRecords:
        """Begin in a directory, and write the resolved configuration.

        Raises:
            ConfigError: if it holds a run already, or cannot be written.
            StorageError: if its disk is full; another try finds the directory as it was.
        """
        cls.claim(directory)
        records = cls(run_id, directory, config)
        with _making(directory), contextlib.ExitStack() as failed:
            # The next try would take them for a run.
            for name in (CONFIG_FILE, METRICS_FILE):
                failed.callback((directory / name).unlink, missing_ok=True)
            write_whole(directory / CONFIG_FILE, dump_config(config).encode())
            write_versions(directory, records.versions)
            # By lines, so that a server that is killed leaves all rounds that it closed.
            (directory / METRICS_FILE).touch(mode=OWNER_ONLY)
            records._file = (directory / METRICS_FILE).open("a", encoding="utf-8", buffering=1)
            failed.pop_all()
        return records

    @classmethod
    def resume(cls, run_id: str, directory: Path, config: Config, metrics_bytes: int) -> RunRecords:
        """Go on with a run's records: the metrics from where they had ``metrics_bytes``.

        What stood behind that is written over by the same lines as the outcomes since are replayed, and stays
        until :meth:`caught_up`: it alone may know of more.

        Raises:
            StorageError: if one of its files cannot be read or written.
        """
        records = cls(run_id, directory, config)
        try:
            records.versions = read_versions(directory)
        except DataError as error:
            # It only informs: what it has stays as it is, and nothing is added.
            records.versions = []
            LOG.warning("%s", error, extra=events.VersionsDamaged(file=VERSIONS_FILE).extra)
        with records._writing(CONFIG_FILE):
            write_whole(directory / CONFIG_FILE, dump_config(config).encode())
        path = directory / METRICS_FILE
        try:
            content = read_plain(path) if path.exists() else b""
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        whole = content.rfind(b"\n", 0, metrics_bytes) + 1
        if whole < metrics_bytes:
            LOG.warning(
                "%s has %d bytes where it had %d: metrics of earlier rounds are lost",
                path,
                whole,
                metrics_bytes,
                extra=events.MetricsLost(file=path.name).extra,
            )
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                with damage_named(METRICS_FILE):
                    entry = json.loads(line)
                    if (shape := LINES.get(str(entry["event"]))) is not None:
                        check_values(entry, shape, METRICS_FILE)
                    records._read_again(entry)
            except DataError as error:
                raise StorageError(
                    f"{path}, line {number}: no line of metrics ({error}); put the file back from a backup, "
                    "or remove it to continue without the metrics so far"
                ) from error
        records._ahead = _readable(content[metrics_bytes:])
        with records._writing(METRICS_FILE):
            path.touch(mode=OWNER_ONLY)
            records._file = path.open("r+" if content else "w", encoding="utf-8", buffering=1)
            records._file.seek(whole)
        try:
            (directory / SUMMARY_FILE).unlink(missing_ok=True)
        except OSError as error:
            records.close()
            raise StorageError(
                f"{directory / SUMMARY_FILE} cannot be removed: {why_unwritten(error)}"
            ) from error
        return records

    def _read_again(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "round":
            self._show_round(line)
        elif line["event"] == "evaluation":
            evaluation = evaluation_of_line(line)
            self.ranking.see(evaluation)
            self.sites.see(line)
            self._show_evaluation(self.ranking.summary_of(evaluation), evaluation)

    def caught_up(self) -> tuple[int, int]:
        """All outcomes since have been replayed: whatever the metrics still have behind them is cut off.

        Returns:
            how many synchronization rounds and evaluations that were.
        """
        with self._writing(METRICS_FILE):
            self._metrics.truncate()
        self.note_version()
        ahead, self._ahead = self._ahead, ()
        last_round = 0 if self.round is None else self.round.synchronization
        last_evaluation = self.ranking.last.round if self.ranking.last else -1
        return (
            sum(line["event"] == "round" and line["synchronization"] > last_round for line in ahead),
            sum(line["event"] == "evaluation" and line["round"] > last_evaluation for line in ahead),
        )

    def note_version(self) -> None:
        """Write down this server's version and arithmetic; say where they are not those of the one before."""
        if not self.versions:
            return
        last, now = self.versions[-1], self.round.round if self.round else 0
        is_other = last.version != __version__
        computes_otherwise = last.arithmetic not in {"", self.arithmetic}
        if is_other or computes_otherwise:
            self.versions.append(Version(__version__, now, self.arithmetic))
        elif last.arithmetic != self.arithmetic:
            self.versions[-1] = replace(last, arithmetic=self.arithmetic)
        else:
            return
        with self._writing(VERSIONS_FILE):
            write_versions(self.directory, self.versions)
        if is_other:
            LOG.info(
                "afl %s resumes a run of afl %s, after round %d",
                __version__,
                last.version,
                now,
                extra=events.VersionChanged(before=last.version, version=__version__, round=now).extra,
            )
        if computes_otherwise:
            LOG.warning(
                "this server computes otherwise than the one before it (of afl %s), with other versions of "
                "NumPy or PyTorch or by other rules of afl: the run goes on after round %d, but not to the "
                "result that it would have had. Workers must compute as this server does. For the result to "
                "the bit, stop now and resume with what the run began with, from a backup",
                last.version,
                now,
                extra=events.ArithmeticChanged(before=last.version, round=now).extra,
            )

    def _shown_versions(self) -> dict[str, str]:
        """All versions, where the run has had more than one."""
        return {"afl_versions": shown_versions(self.versions)} if len(self.versions) > 1 else {}

    def discard(self) -> None:
        """Remove what :meth:`create` made, since no run came of it; the directory is free again."""
        self.close()
        for name in (CONFIG_FILE, METRICS_FILE, VERSIONS_FILE):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    # Metrics.

    @property
    def _metrics(self) -> TextIO:
        assert self._file is not None
        return self._file

    @property
    def metrics_bytes(self) -> int:
        """How long the metrics are."""
        return self._metrics.tell()

    def sync(self) -> None:
        """Wait until the metrics so far are on the disk."""
        with self._writing(METRICS_FILE):
            os.fsync(self._metrics.fileno())

    def lost(self) -> str:
        """What has become of the directory, if it is no longer the one that this run writes to."""
        path = self.directory / METRICS_FILE
        with contextlib.suppress(OSError):
            if os.path.samestat(path.stat(), os.fstat(self._metrics.fileno())):
                return ""
        return self._gone or f"{path} is gone, or another file has its place"

    @property
    def _gone(self) -> str:
        """Why there is no directory any more; empty if there is."""
        try:
            with naming_paths(StorageError):
                is_there = kind_of(self.directory) == "folder"
        except StorageError as error:
            return f"the run directory cannot be looked into any more: {error}"
        return (
            ""
            if is_there
            else f"the run directory {self.directory} is gone; restore it from a backup, or begin again in "
            "another one"
        )

    def train_round(self, summary: RoundSummary, *, seconds: float, up: WireCount, down: WireCount) -> None:
        """A closed round: one line."""
        self.round = summary
        self.round_seconds = seconds
        hides = summary.mean_loss is not None
        worst = None if hides else int(np.nanargmax(summary.losses))
        line = self._line(
            "round",
            up,
            down,
            round=summary.round,
            synchronization=summary.synchronization,
            seconds=round(seconds, 6),
            loss_max=None if worst is None else float(summary.losses[worst]),
            loss_max_worker=worst,
            loss_mean=train_loss_of(summary),
            dual_weight_max=None if hides else float(summary.dual_weights.max()),
            **_named(absent=summary.absent),
            **({} if summary.integers is None else {"integers": asdict(summary.integers)}),
        )
        self._show_round(line, summary.dual_weights)

    def evaluation(self, evaluation: Evaluation, *, up: WireCount, down: WireCount) -> None:
        """An evaluation: one line."""
        summary = self.ranking.summary_of(evaluation)
        weights = None if self.round is None or evaluation.means is not None else self.round.dual_weights
        by = ranked(vars(summary))
        self._say_unranked(evaluation, by)
        self.last_evaluation = evaluation
        line = self._line(
            "evaluation",
            up,
            down,
            round=summary.round,
            **self._phase(summary),
            worst_worker=summary.worst_worker,
            worst_accuracy=summary.worst_accuracy,
            mean_accuracy=summary.mean_accuracy,
            max_loss=summary.max_loss,
            mean_loss=summary.mean_loss,
            **({name: getattr(summary, name) for name in RANK_KEYS} if summary.rank_by else {}),
            **(
                {"workers": evaluation.metrics, "examples": evaluation.examples}
                if evaluation.means is None
                else {"smooth_worst_loss": evaluation.smooth_worst, "means": evaluation.means}
            ),
            **({} if weights is None else {"dual_weights": weights.tolist()}),
            **self._sites(),
            **_named(absent=evaluation.absent, non_finite=evaluation.non_finite),
            **({"warnings": evaluation.warnings} if evaluation.warnings else {}),
            **({"tensor_residual_norms": norms} if (norms := evaluation.tensor_residual_norms) else {}),
        )
        self.sites.see(line)
        self._show_evaluation(summary, evaluation)
        LOG.info(
            "round %d: %s",
            summary.round,
            hidden_figures(vars(summary))
            or f"worst worker {summary.worst_worker}, {by.metric} {by.shown(by.worst, 4)} "
            f"(mean {by.shown(by.mean, 4)})",
            extra=events.Evaluation(
                round=summary.round,
                worst_worker=summary.worst_worker,
                worst_site=self.names.get(summary.worst_worker) if summary.worst_worker is not None else None,
                worst_accuracy=summary.worst_accuracy,
                max_loss=summary.max_loss,
                smooth_worst_loss=summary.smooth_worst_loss,
                rank_by=by.metric,
                worst_value=by.worst,
            ).extra,
        )

    def _phase(self, summary: EvaluationSummary) -> dict[str, int]:
        """Where in its block the model is, if the dual weights restart."""
        if summary.rounds_since_restart is None:
            return {}
        block = self.config.algorithm.restart_length
        return {"rounds_since_restart": summary.rounds_since_restart, "block": block}

    def _sites(self) -> dict[str, Any]:
        """All sites' names by worker id, where there are any."""
        workers = range(self.config.workers)
        return {"sites": [self.names.get(worker) for worker in workers]} if self.names else {}

    def _say_unranked(self, evaluation: Evaluation, by: Ranked) -> None:
        """Warn, at the first evaluation, that no worker reports the metric that is to rank them."""
        wanted = self.ranking.by
        if wanted is None or wanted.metric == by.metric or self.last_evaluation is not None:
            return
        there = sorted(
            {name for metrics in evaluation.metrics for name in metrics} | set(evaluation.means or ())
        )
        LOG.warning(
            "no worker reports the metric %s (evaluation.rank_by), so %s ranks; there is: %s",
            wanted.metric,
            by.metric,
            ", ".join(there),
            extra=events.NotRanked(rank_by=wanted.metric, metrics=there).extra,
        )

    def _line(self, event: str, up: WireCount, down: WireCount, **values: Any) -> dict[str, Any]:
        line = {
            "event": event,
            **values,
            "uplink_bytes": up.total,
            "downlink_bytes": down.total,
            "uplink_float_equivalents": up.float_equivalents,
            "downlink_float_equivalents": down.float_equivalents,
        }
        with self._writing(METRICS_FILE):
            self._metrics.write(json.dumps(line) + "\n")
        return line

    def _show_round(self, line: Mapping[str, Any], dual_weights: NDArray[np.float64] | None = None) -> None:
        if self.first_round is None:
            self.first_round = line
        if self.history is not None:
            sent = line["uplink_bytes"] + line["downlink_bytes"]
            weight = line["dual_weight_max"]
            bucket = Bucket(line["round"], math.nan if weight is None else weight, sent)
            self.history.add_round(bucket, dual_weights)

    def _show_evaluation(self, summary: EvaluationSummary, evaluation: Evaluation) -> None:
        if self.history is not None:
            self.history.add_evaluation(summary, evaluation.metrics)

    # Models, and the end.

    def save_model(self, name: str, snapshot: ModelCopy, rounds_applied: int) -> None:
        """Write ``model-NAME.safetensors``: parameters by name, loadable into the task's own module."""
        assert name in MODEL_NAMES
        summaries = self.ranking.evaluations
        summary = next((entry for entry in summaries if entry.round == rounds_applied), None)
        metadata = {
            "format": "pt",
            "afl_version": __version__,
            **self._shown_versions(),
            "run_id": self.run_id,
            "output": name,
            "rounds_applied": str(rounds_applied),
            "task": self.config.task.name,
            "task_options": json.dumps(dict(self.config.task.options), sort_keys=True),
            "algorithm": self.config.algorithm.name,
            "workers": str(self.config.workers),
            "trained_parameters": str(snapshot.dim),
            "buffers": snapshot.buffers,
        }
        algorithm = self.config.algorithm
        if algorithm.final_model == "block-mean" and rounds_applied == algorithm.rounds:
            metadata["mean_of_rounds"] = str(min(algorithm.block_length, rounds_applied))
        digests = {"initial_model": snapshot.initial_digest, "frozen_digest": snapshot.frozen_digest}
        metadata |= {name: digest for name, digest in digests.items() if digest}
        if summary is not None:
            served = ("worst_worker", "max_loss", "worst_accuracy", "smooth_worst_loss", *RANK_KEYS)
            metadata |= {
                name: value if isinstance(value, str) else repr(value)
                for name in served
                if (value := getattr(summary, name)) is not None
            }
        path = self.directory / model_file(name)
        with self._writing(path.name), replacing(path) as temporary:
            save_file(snapshot.tensors, temporary, metadata)

    def summarize(self, code: ExitCode, reason: str, seconds: float, counters: Counters) -> dict[str, Any]:
        """Write and return ``summary.json``; nothing is written after it.

        Raises:
            StorageError: if it cannot be written, or the directory is not this run's any more.
        """
        if lost := self.lost():
            raise StorageError(lost)
        found, first = self.ranking.evaluations, self.first_round
        summary = {
            "run_id": self.run_id,
            "afl_version": __version__,
            **self._shown_versions(),
            "result": code.name.lower(),
            "reason": reason,
            "algorithm": self.config.algorithm.name,
            "task": self.config.task.name,
            "workers": self.config.workers,
            **self._sites(),
            **({"record_privacy": words} if (words := self.config.privacy.record_words) else {}),
            "rounds": self.round.round if self.round else 0,
            "seconds": round(seconds, 3),
            # Its losses are of a model that nobody has trained.
            "first_round": first
            and {name: first[name] for name in ("round", "loss_max", "loss_max_worker", "loss_mean")},
            "first": vars(found[0]) if found else None,
            "last": vars(found[-1]) if found else None,
            "best": self.ranking.best and vars(self.ranking.best),
            "communication": {
                direction: {
                    "wire_bytes": count.total,
                    "wire_bytes_by_kind": count.wire,
                    "payload_bytes_by_part": count.parts,
                    "frames": count.frames,
                    "float_equivalents": count.float_equivalents,
                    "float_equivalents_as_bytes": 4 * count.float_equivalents,
                }
                for direction, count in (("uplink", counters.uplink), ("downlink", counters.downlink))
            },
            "uncompressed_bytes": counters.uncompressed_bytes,
            "models": sorted(path.name for path in self.directory.glob("model-*.safetensors")),
        }
        with self._writing(SUMMARY_FILE):
            write_whole(self.directory / SUMMARY_FILE, json.dumps(summary, indent=2).encode() + b"\n")
        return summary

    def close(self) -> None:
        """Write no more metrics."""
        if self._file is not None:
            # What a full disk did not take is still buffered and fails again.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            if self._gone:
                raise StorageError(f"{name} cannot be written: {self._gone}") from error
            reason = why_unwritten(error) if isinstance(error, OSError) else error
            raise StorageError(f"{self.directory / name} cannot be written: {reason}") from error


def _readable(lines: bytes) -> list[dict[str, Any]]:
    """Lines of rounds and evaluations, without those that were cut off or changed."""
    found = []
    for line in lines.splitlines():
        try:
            values = json.loads(line)
            is_line = type(values["round"]) is int and (
                values["event"] == "evaluation" or type(values["synchronization"]) is int
            )
        except (ValueError, TypeError, KeyError):
            continue
        if is_line:
            found.append(values)
    return found


def new_run_id() -> str:
    """A new, sortable name: the UTC second and random hexadecimal digits."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"


def _named(**workers: Sequence[int]) -> dict[str, Any]:
    """Workers, where there are any: a line without them is one of all."""
    return {name: entry for name, entry in workers.items() if entry}


@contextlib.contextmanager
def _making(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_begin(directory, error) from error
