"""Tells trackers of a run while it goes on, each on a thread of its own, without the run's noticing.

``metrics.jsonl`` is the queue: a thread reads what was written since it last looked. So a round costs
nothing more, what waits for a slow tracker takes no memory, and a resumed run catches up.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from afl.config import Config
from afl.config.compare import flat
from afl.daemon import events
from afl.errors import AflError, ExitCode, StorageError
from afl.paths import naming_paths, read_plain
from afl.runs.durable import own_folder
from afl.runs.files import METRICS_FILE, TRACKERS_FOLDER
from afl.runs.tracking.lines import RoundReader
from afl.runs.tracking.tracker import Setting, Status, TrackedRound, TrackedRun, Tracker

LOG = logging.getLogger("afl.runs.tracking")
POSITION_FILE = "position.json"
# Between two looks at the metrics: many rounds at a time cost a tracker little more than one.
INTERVAL_S = 1.0
MOST_ROUNDS = 256  # handed to a tracker at once; what a process that is killed meanwhile may leave out
STALL_S = 30.0  # how long, at the run's end, a tracker may take over one batch before it is left behind
END_S = 120.0  # how long trackers may take over the rest at the end of the run
STOP_S = 2.0  # the same for a run that is only stopped: the rest is sent when it is resumed


class Following:
    """A run's trackers, for as long as this process runs it; each has a folder of its own in the run's.

    What ``metrics.jsonl`` holds already is told too, unless it was before.
    """

    def __init__(self, trackers: Mapping[str, Tracker], run_id: str, directory: Path, config: Config) -> None:
        self._followers = {
            name: _Follower(name, tracker, run_id, directory, config) for name, tracker in trackers.items()
        }

    def start(self) -> None:
        """Start a thread for each tracker."""
        for follower in self._followers.values():
            follower.thread.start()

    @property
    def failures(self) -> Mapping[str, int]:
        """How often each tracker has failed in this process."""
        return {name: follower.failures for name, follower in self._followers.items()}

    def end(self, status: Status) -> None:
        """Give trackers the rest, for a bounded time: one that hangs or is slow is left behind, and named.

        Must be called once the run writes no more.
        """
        now = time.monotonic()
        for follower in self._followers.values():
            follower.status, follower.progressed_at = status, now
            follower.ending.set()
        limit = now + (STOP_S if status == "stopped" else END_S)
        for follower in self._followers.values():
            follower.leave(limit)


@dataclass(eq=False)
class _Follower:
    """One tracker and its thread."""

    name: str
    tracker: Tracker
    run_id: str
    directory: Path
    config: Config
    rounds: int = 0
    failures: int = 0
    status: Status = "stopped"
    is_left: bool = False
    progressed_at: float = field(default_factory=time.monotonic)
    ending: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.folder = self.directory / TRACKERS_FOLDER / self.name
        # Not joined when the process ends: a tracker that hangs would hold it for ever.
        self.thread = threading.Thread(target=self._follow, name=f"afl-tracker-{self.name}", daemon=True)

    def leave(self, limit: float) -> None:
        """Wait until it is done, until ``limit``, or until it stalls."""
        while self.thread.is_alive():
            left = min(limit, self.progressed_at + STALL_S) - time.monotonic()
            if left <= 0:
                self.is_left = True
                LOG.warning(
                    "tracker %s did not finish and is abandoned: it got %d rounds in this process",
                    self.name,
                    self.rounds,
                    extra=events.TrackerLeft(tracker=self.name, rounds=self.rounds).extra,
                )
                return
            self.thread.join(left)
        ended = events.TrackerEnded(tracker=self.name, rounds=self.rounds, failures=self.failures)
        message = "tracker %s got %d rounds; it failed %d times"
        LOG.info(message, self.name, self.rounds, self.failures, extra=ended.extra)

    def _follow(self) -> None:
        try:
            with naming_paths(StorageError):
                own_folder(self.folder)
                after = self._told_before()
            settings = settings_of(self.config)
            self.tracker.started(TrackedRun(self.run_id, self.directory, self.folder, settings, after))
            reader = RoundReader(self.directory / METRICS_FILE, after)
            is_last = False
            while not is_last:
                # Before reading: what is written until then is read.
                is_last = self.ending.wait(INTERVAL_S)
                self._tell(reader.whole_rounds())
            if self.status != "stopped":
                self._tell(reader.last_round())
            if not self.is_left:
                self.tracker.ended(self.status)
        except BaseException as error:  # noqa: BLE001  # other people's code, which the run must survive
            self._failed(error)

    def _tell(self, rounds: Iterator[TrackedRound]) -> None:
        while (batch := list(islice(rounds, MOST_ROUNDS))) and not self.is_left:
            # Before the tracker has them: what might have been taken is not given again. Not synced: after a
            # loss of power the rounds since may be missing at the tracker, or twice.
            temporary = self.folder / f".{POSITION_FILE}.new"
            temporary.write_text(json.dumps({"run_id": self.run_id, "round": batch[-1].round}), "utf-8")
            temporary.replace(self.folder / POSITION_FILE)
            try:
                self.tracker.log(batch)
            except BaseException as error:  # noqa: BLE001  # as above; the next may be taken
                self._failed(error)
            else:
                self.rounds += len(batch)
            self.progressed_at = time.monotonic()

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        if self.failures == 1:
            LOG.warning(
                "tracker %s failed; it is tried again with later rounds, and the run continues: %s: %s",
                self.name,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, AflError) else error,
                extra=events.TrackerFailed(tracker=self.name).extra,
            )

    def _told_before(self) -> int:
        """The last round that the tracker was handed before."""
        path = self.folder / POSITION_FILE
        if not path.exists():
            return 0
        try:
            position = json.loads(read_plain(path))
            return int(position["round"]) if position["run_id"] == self.run_id else 0
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{path} is damaged ({error}), so what the tracker has is not known; delete it to send "
                "everything again"
            ) from error


def status_of(code: ExitCode, *, can_go_on: bool) -> Status:
    """A run's end as trackers name it."""
    return "finished" if code is ExitCode.OK else "stopped" if can_go_on else "failed"


def settings_of(config: Config) -> dict[str, Setting]:
    """Every key of the configuration, dotted; a list is one text."""
    values = flat(config.model_dump(mode="json"))
    return {key: json.dumps(value) if isinstance(value, list) else value for key, value in values}
