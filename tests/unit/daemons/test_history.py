"""What the status page draws stays bounded, and hides neither a peak nor the last of anything."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from afl.errors import ConfigError, ExitCode, StorageError
from afl_server.federation.counters import Counters
from afl_server.federation.evaluation_summary import EvaluationSummary
from afl_server.pages.dual_window import COLUMNS
from afl_server.pages.history import BUCKETS, MOST_FOLLOWED, Bucket, History
from afl_server.pages.page_data import PageData
from afl_server.pages.recent_events import RecentEvents
from afl_server.storage import records as records_module
from afl_server.storage.records import RunRecords
from support.fake_run import FakeRun


def rounds_to(round_: int, weight: float = 0.5) -> Bucket:
    return Bucket(round_, weight, 30 * round_)


def point(round_: int) -> EvaluationSummary:
    return EvaluationSummary(round_, 0, 0.5, 0.6, 1.0, 0.5)


COUNTS = [1, 2, 255, 256, 257, 258, 511, 512, 513, 1024, 1025, 1601]


@pytest.mark.parametrize("rounds", COUNTS)
def test_every_round_is_in_exactly_one_bucket(rounds: int) -> None:
    history = History(2)
    for number in range(1, rounds + 1):
        history.add_round(rounds_to(number, float(number)), np.array([0.5, 0.5]))
    view = history.view()
    assert len(view.buckets) <= BUCKETS
    assert sum(entry.rounds for entry in view.buckets) == rounds
    assert [entry.round for entry in view.buckets] == list(np.cumsum([e.rounds for e in view.buckets]))
    assert {entry.rounds for entry in view.buckets[:-1]} <= {view.width}
    assert view.buckets[-1].weight_max == rounds
    assert view.buckets[-1].sent == 30 * rounds


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("peak", [0, 1, 254, 255, 256, 511, 512, 700, 1299])
def test_a_peak_of_one_round_survives_merging(peak: int, worker: int) -> None:
    history = History(2)
    for number in range(1300):
        weights = np.array([0.5, 0.5])
        if number == peak:
            weights[worker], weights[1 - worker] = 0.9, 0.1
        history.add_round(rounds_to(number + 1), weights)
    buckets = history.view().buckets
    assert max(bucket.high[worker] for bucket in buckets) == np.float32(0.9)
    assert min(bucket.low[worker] for bucket in buckets) == np.float32(0.5)
    assert all((bucket.low <= bucket.high).all() for bucket in buckets)


@pytest.mark.parametrize("evaluations", COUNTS)
def test_the_first_and_the_last_evaluation_are_there(evaluations: int) -> None:
    history = History(2)
    for number in range(evaluations):
        history.add_evaluation(point(number), [{"loss": float(number), "accuracy": 0.5}, {}])
    view = history.view()
    rounds = [point.summary.round for point in view.points]
    assert len(rounds) <= BUCKETS
    assert rounds[0] == 0
    assert rounds[-1] == evaluations - 1
    assert rounds[:-1] == list(range(0, rounds[-1], view.spacing)), "evenly, and the last"
    assert [point.loss[0] for point in view.points] == rounds, "each row is its evaluation's"
    assert all(np.isnan(point.loss[1]) for point in view.points), "of an absent worker nothing is known"
    assert [point.spread[1, 0] for point in view.points] == rounds


def test_the_spread_is_over_the_workers_that_are_known() -> None:
    history = History(6)
    history.add_evaluation(point(1), [{"loss": float(worker)} for worker in range(5)] + [{}])
    (evaluated,) = history.view().points
    assert evaluated.spread[1].tolist() == [0, 1, 3, 4]
    assert np.isnan(evaluated.spread[0]).all(), "there is no accuracy"


def test_so_many_workers_have_no_curves_of_their_own() -> None:
    history = History(MOST_FOLLOWED + 1)
    history.add_round(rounds_to(1), np.full(MOST_FOLLOWED + 1, 1 / (MOST_FOLLOWED + 1)))
    history.add_evaluation(point(1), [{"loss": 1.0}] * (MOST_FOLLOWED + 1))
    view = history.view()
    assert len(view.buckets[0].high) == len(view.points[0].loss) == 0
    assert view.points[0].spread[1].tolist() == [1, 1, 1, 1]
    assert history.heaviest(3) == [0, 1, 2]


def test_the_heaviest_workers() -> None:
    history = History(4)
    for number in range(10):
        history.add_round(rounds_to(number), np.array([0.1, 0.4, 0.1, 0.4]))
    assert history.heaviest(3) == [1, 3, 0]


def test_a_run_that_is_gone_on_with_has_its_history(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", workers=2)
    run.play(600, evaluate_every=25)
    before = run.records.history
    assert before is not None
    run.close()
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    records = RunRecords.resume(run.run_id, tmp_path / "run", run.config, size)
    try:
        assert records.history is not None
        seen, known = records.history.view(), before.view()
        assert seen.buckets == known.buckets
        assert [point.summary for point in seen.points] == [point.summary for point in known.points]
        for one, other in zip(seen.points, known.points, strict=True):
            np.testing.assert_array_equal(one.value, other.value)
        for bucket in seen.buckets:
            assert np.isnan(bucket.high).all(), "the metrics do not have each worker's weights"
        assert records.history.heaviest(2) == [0, 1]
        assert records.first_round == run.records.first_round is not None
        records.history.add_round(rounds_to(601), np.array([0.3, 0.7]))
        assert records.history.heaviest(1) == [1]
    finally:
        records.close()


KINDS = {"fifo": stat.S_IFIFO, "socket": stat.S_IFSOCK}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("thing", [*KINDS, "folder", "damage"])
def test_what_has_the_place_of_a_runs_file_is_told_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, thing: str
) -> None:
    """``versions.json`` only informs."""
    run = FakeRun(tmp_path / "run", workers=2)
    run.play(3)
    run.close()
    directory, size = tmp_path / "run", (tmp_path / "run" / "metrics.jsonl").stat().st_size
    for name in ("versions.json", "metrics.jsonl"):
        path = directory / name
        path.unlink()
        match thing:
            case "folder":
                path.mkdir()
            case "damage":
                path.write_bytes(b"x" * size + b"\n")
            case _:
                os.mknod(path, KINDS[thing] | 0o600)
        before = path.stat()
        if name == "metrics.jsonl":
            with pytest.raises(StorageError, match=r"metrics\.jsonl(, line 1: no line| cannot be read)"):
                RunRecords.resume(run.run_id, directory, run.config, size + 1)
        else:
            records = RunRecords.resume(run.run_id, directory, run.config, size)
            assert records.caught_up() == (0, 0)
            assert records.summarize(ExitCode.OK, "", 1.0, Counters())["result"] == "ok"
            records.close()
            assert "versions.json cannot be read" in caplog.text
        assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)


def test_a_full_disk_is_told_of_the_file_that_it_was_full_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path / "run", workers=2)
    run.play(3)
    run.close()
    directory = tmp_path / "run"
    size = (directory / "metrics.jsonl").stat().st_size

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records_module, "write_whole", full)
    with pytest.raises(StorageError) as failed:
        RunRecords.resume(run.run_id, directory, run.config, size)
    assert str(failed.value) == (
        f"{directory / 'config.yaml'} cannot be written: No space left on device; free some space, and start "
        "the server again to resume the run"
    )
    assert (directory / "metrics.jsonl").stat().st_size == size


def test_a_run_that_a_full_disk_keeps_from_beginning_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor starts again after the exit code of a full disk, and not after a wrong configuration's."""
    run = FakeRun(tmp_path / "other", workers=2)
    run.close()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    directory = tmp_path / "run"
    monkeypatch.setattr(records_module, "write_versions", full)
    with pytest.raises(StorageError) as failed:
        RunRecords.create("x", directory, run.config)
    assert str(failed.value) == (
        f"run.directory: {directory} cannot be written: No space left on device; free some space, and start "
        "the server again"
    )
    monkeypatch.undo()
    RunRecords.create("x", directory, run.config).close()


def test_a_line_that_is_none_is_told_with_its_number(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", workers=2)
    run.play(3)
    run.close()
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"[]\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(StorageError, match=r"metrics\.jsonl, line 2: no line of metrics .* from a backup"):
        RunRecords.resume(run.run_id, tmp_path / "run", run.config, path.stat().st_size)


def test_a_directory_with_a_run_is_left_as_it_is_and_another_one_asked_for(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", workers=2)
    run.close()
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as refused:
        RunRecords.create("x", tmp_path / "run", run.config)
    assert str(refused.value) == (
        f"run.directory: {tmp_path / 'run'} already holds a run (config.yaml is there), and nothing is "
        "overwritten; name another directory: --set run.directory=runs/NEW"
    )
    assert (tmp_path / "run" / "config.yaml").read_bytes() == before


def test_without_http_nothing_is_kept(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", workers=2)
    run.close()
    server = run.config.server.model_copy(update={"http": None})
    config = run.config.model_copy(update={"server": server})
    records = RunRecords.create("x", tmp_path / "second", config)
    records.close()
    assert records.history is None


def test_what_is_not_finite_is_no_number_in_json(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run", workers=3)
    run.play(20)
    run.report_seconds[1] = math.nan
    data = PageData(run.sources(RecentEvents()))
    table = json.loads(json.dumps(data.workers(), allow_nan=False))
    assert table["seconds"][table["id"].index(1)] is None
    run.close()


@pytest.mark.parametrize("evaluations", [1, 59, 60, 61, 250, 1601])
def test_the_worst_worker_s_curve_is_of_the_whole_run_and_bounded(evaluations: int) -> None:
    history = History(2)
    assert history.worst() == {"measure": None, "rounds": [], "values": [], "last": None}
    for number in range(1, evaluations + 1):
        summary = EvaluationSummary(number, 0, number / 2000, 0.9, 1.0, 0.5)
        history.add_evaluation(summary, [{"accuracy": 0.5, "loss": 1.0}] * 2)
    curve = history.worst()
    assert len(curve["rounds"]) <= COLUMNS
    assert len(curve["rounds"]) > min(evaluations, COLUMNS / 2) - 1
    assert curve["rounds"][0] == 1
    assert curve["values"] == [round_ / 2000 for round_ in curve["rounds"]]
    assert curve["last"] == evaluations / 2000


def test_the_curve_of_a_task_without_accuracy_is_of_its_largest_loss() -> None:
    history = History(2)
    history.add_evaluation(EvaluationSummary(10, 1, None, None, 2.5, 0.5), [{"loss": 1.0}] * 2)
    assert history.worst() == {"measure": "worst loss", "rounds": [10], "values": [2.5], "last": 2.5}
