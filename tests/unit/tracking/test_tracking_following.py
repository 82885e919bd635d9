"""Trackers that are slow, hang or fail hold nothing up, and no round comes to one twice."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from afl import ConfigError
from afl.config import config_from_mapping
from afl.errors import ExitCode
from afl.runs.tracking import following as module
from afl.runs.tracking.following import Following, settings_of, status_of
from afl.runs.tracking.lines import RoundReader, numbers_of
from afl.runs.tracking.tracker import Status, TrackedRound, TrackedRun, load_trackers
from support.packages import install

CONFIG = config_from_mapping(
    {
        "workers": 2,
        "task": {"name": "synthetic"},
        "algorithm": {"name": "afl-br", "rounds": 10, "eta_w": 0.1, "eta_q": 0.1},
        "run": {"seed": 1},
    }
)


class Notes:
    """A tracker that notes what it is told."""

    def __init__(self) -> None:
        self.run: TrackedRun | None = None
        self.rounds: list[TrackedRound] = []
        self.status: Status | None = None
        self.got = threading.Event()

    def started(self, run: TrackedRun) -> None:
        self.run = run

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        self.rounds += rounds
        self.got.set()

    def ended(self, status: Status) -> None:
        self.status = status

    @property
    def numbers(self) -> list[int]:
        return [each.round for each in self.rounds]


class Failing(Notes):
    def log(self, rounds: Sequence[TrackedRound]) -> None:
        super().log(rounds)
        raise RuntimeError("the disk of the tracker is full")


class Hanging(Notes):
    """Hangs in its first batch until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def log(self, rounds: Sequence[TrackedRound]) -> None:
        self.got.set()
        self.let_go.wait(60)
        super().log(rounds)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)


def line(event: str, round_: int, **values: Any) -> str:
    return json.dumps({"event": event, "round": round_, **values}) + "\n"


def write(directory: Path, rounds: Sequence[int], mode: str = "a") -> None:
    """Rounds as a server writes them, with an evaluation after each that is a multiple of five."""
    with (directory / "metrics.jsonl").open(mode, encoding="utf-8") as file:
        for round_ in rounds:
            file.write(line("round", round_, loss_max=1.0 / round_, uplink_bytes=10 * round_))
            if round_ % 5 == 0:
                workers = [{"loss": 0.5, "accuracy": 0.75}, {"loss": 0.25, "accuracy": 1.0}]
                file.write(line("evaluation", round_, worst_accuracy=0.75, workers=workers))


def follow(trackers: Mapping[str, Any], directory: Path) -> Following:
    made = Following(trackers, "run-1", directory, CONFIG)
    made.start()
    return made


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("afl-tracker-"):
            thread.join(60)


def test_a_round_and_its_evaluation_are_told_as_one(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    notes = Notes()
    following = follow({"notes": notes}, tmp_path)
    following.end("finished")
    assert notes.numbers == list(range(1, 8))
    assert notes.status == "finished"
    assert notes.rounds[4].metrics == {
        "round/loss_max": 0.2,
        "sent/uplink_bytes": 50.0,
        "evaluation/worst_accuracy": 0.75,
        "worker/0/loss": 0.5,
        "worker/0/accuracy": 0.75,
        "worker/1/loss": 0.25,
        "worker/1/accuracy": 1.0,
    }
    assert notes.run is not None
    assert (notes.run.run_id, notes.run.after, notes.run.is_resumed) == ("run-1", 0, False)
    assert notes.run.folder.is_dir()
    assert notes.run.config["algorithm.eta_w"] == 0.1
    assert following.failures == {"notes": 0}


def test_a_run_that_goes_on_is_told_on_and_no_round_twice(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    first = Notes()
    follow({"notes": first}, tmp_path).end("stopped")
    # Of round 5 more may come, so it waits.
    assert first.numbers == [1, 2, 3, 4]
    # The server repeats what came after its checkpoint.
    write(tmp_path, range(1, 4), "w")
    second = Notes()
    following = follow({"notes": second}, tmp_path)
    write(tmp_path, range(4, 11))
    following.end("finished")
    assert second.numbers == list(range(5, 11))
    assert second.run is not None
    assert (second.run.after, second.run.is_resumed) == (4, True)
    assert "worker/0/loss" in second.rounds[0].metrics
    third = Notes()
    follow({"notes": third}, tmp_path).end("finished")
    assert third.numbers == []


def test_another_run_in_the_same_folder_is_told_from_its_beginning(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    follow({"notes": Notes()}, tmp_path).end("finished")
    other = Notes()
    following = Following({"notes": other}, "run-2", tmp_path, CONFIG)
    following.start()
    following.end("finished")
    assert other.numbers == [1, 2, 3, 4, 5]


def test_what_is_written_meanwhile_is_told_and_half_a_line_waits(tmp_path: Path) -> None:
    write(tmp_path, [1, 2])
    notes = Notes()
    following = follow({"notes": notes}, tmp_path)
    assert notes.got.wait(60)
    whole = line("round", 3, loss_max=0.5)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8", buffering=1) as file:
        file.write(whole[:20])
        file.flush()
        notes.got.clear()
        file.write(whole[20:])
    assert notes.got.wait(60)
    following.end("failed")
    assert notes.numbers == [1, 2, 3]
    assert notes.status == "failed"


def test_a_tracker_that_fails_is_logged_once_counted_and_told_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, notes = Failing(), Notes()
    write(tmp_path, [1, 2])
    following = follow({"failing": failing, "notes": notes}, tmp_path)
    assert failing.got.wait(60)
    failing.got.clear()
    write(tmp_path, [3, 4])
    assert failing.got.wait(60)
    following.end("finished")
    assert failing.numbers == notes.numbers == [1, 2, 3, 4]
    assert failing.status == "finished"
    assert following.failures["failing"] >= 2
    assert following.failures["notes"] == 0
    logged = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [vars(record)["event"] for record in logged] == ["tracker_failed"]
    (message,) = [record.getMessage() for record in logged]
    assert message.startswith(
        "tracker failing failed; it is tried again with later rounds, and the run continues"
    )
    assert message.endswith("RuntimeError: the disk of the tracker is full")


def test_a_tracker_that_cannot_start_is_logged_and_leaves_the_others_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unwilling(Notes):
        def started(self, run: TrackedRun) -> None:
            raise SystemExit(3)

    write(tmp_path, [1])
    notes = Notes()
    following = follow({"unwilling": Unwilling(), "notes": notes}, tmp_path)
    following.end("finished")
    assert notes.numbers == [1]
    assert following.failures == {"unwilling": 1, "notes": 0}
    assert "tracker unwilling failed" in caplog.text


@pytest.mark.usefixtures("no_thread_left")
def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.05)
    hanging, notes = Hanging(), Notes()
    write(tmp_path, range(1, 4))
    following = follow({"hanging": hanging, "notes": notes}, tmp_path)
    assert hanging.got.wait(60)
    following.end("finished")
    assert notes.numbers == [1, 2, 3]
    assert notes.status == "finished"
    assert "tracker hanging did not finish and is abandoned" in caplog.text
    hanging.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "afl-tracker-hanging":
            thread.join(60)
    assert hanging.status is None, "a tracker that was left behind hears nothing more"


def test_a_position_that_is_damaged_stops_its_tracker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [1, 2])
    folder = tmp_path / "trackers" / "notes"
    folder.mkdir(parents=True)
    (folder / "position.json").write_text("{", encoding="utf-8")
    notes = Notes()
    following = follow({"notes": notes}, tmp_path)
    following.end("finished")
    assert notes.numbers == []
    assert following.failures == {"notes": 1}
    assert "is damaged" in caplog.text
    assert "delete it to send everything again" in caplog.text


def test_many_workers_are_left_to_the_metrics() -> None:
    def evaluation(workers: int) -> dict[str, Any]:
        metrics = [{"loss": 1.0}] * workers
        return {"event": "evaluation", "round": 1, "worst_accuracy": None, "workers": metrics}

    assert len(numbers_of(evaluation(64))) == 64
    assert numbers_of(evaluation(65)) == {}
    assert numbers_of({"event": "of a later version", "round": 1, "value": 3}) == {}


def test_a_reader_takes_every_line_once_and_whole(tmp_path: Path) -> None:
    write(tmp_path, range(1, 30))
    reader = RoundReader(tmp_path / "metrics.jsonl", 3)
    assert [each.round for each in reader.whole_rounds()] == list(range(4, 29))
    assert list(reader.whole_rounds()) == []
    written = line("round", 30, loss_max=0.5) + line("round", 31, loss_max=0.5)
    for part, rounds in ((written[:70], [29]), (written[70:], [30])):
        with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(part)
        assert [each.round for each in reader.whole_rounds()] == rounds
    assert [each.round for each in reader.last_round()] == [31]


def test_how_a_run_ended() -> None:
    assert status_of(ExitCode.OK, can_go_on=False) == "finished"
    assert status_of(ExitCode.INTERRUPTED, can_go_on=True) == "stopped"
    assert status_of(ExitCode.DIVERGED, can_go_on=False) == "failed"


def test_settings_are_flat() -> None:
    settings = settings_of(CONFIG)
    assert settings["run.trackers"] == "[]"
    assert settings["server.tls"] is None
    assert settings["faults.stragglers.policy"] == "wait"


def test_a_name_that_is_not_installed_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"run.trackers: no tracker is called tensorbord; did you mean tens"
    ):
        load_trackers(["tensorbord"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tracking_own:Nothing", "cannot be made"),
        ("tracking_own:Half", "is no tracker: it lacks log, ended"),
        ("no_such_module:X", "cannot be made: No module named"),
    ],
)
def test_a_users_own_that_is_none(
    value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "class Half:\n    def started(self, run): ...\n"
    installed(tmp_path, monkeypatch, value, own)
    with pytest.raises(ConfigError, match=message):
        load_trackers(["own"])


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, source: str) -> None:
    """A package with an entry point in ``afl.trackers``."""
    (folder / "tracking_own.py").write_text(source, encoding="utf-8")
    install(folder, "tracking-own", {"afl.trackers": {"own": value}})
    monkeypatch.syspath_prepend(str(folder))
