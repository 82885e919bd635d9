"""Whatever stands in a run's summary and metrics: a line that names the file, and no traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from afl.core.grid import IntegerRound
from afl.errors import AflError, ExitCode, StorageError
from afl_cli.inspect import MOST_ROWS, described
from afl_cli.main import main
from afl_server.pages.report import report_of
from afl_server.storage.records import RunRecords
from support.fake_run import FakeRun
from support.longer import but_long

pytestmark = pytest.mark.timeout(300)

ODD = (None, "x", "", -1, 2.5, 10**30, 1e999, True, [], [None], {}, {"x": "y"}, [[1]] * 9)
INTEGERS = IntegerRound(
    uplink_bits=3.5, downlink_bits=4.0, smallest_exponent=-9, largest_exponent=-3, zeros=0.5, at_limit=0.01
)


def finished(folder: Path, **more: Any) -> FakeRun:
    run = FakeRun(folder, rounds=4, more=more)
    run.integers = INTEGERS
    run.play(4, evaluate_every=2)
    run.records.summarize(ExitCode.OK, "the run is complete", 61.5, run.counters)
    run.close()
    return run


def changed(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The value with each part of it odd in turn, and where."""
    for odd in ODD:
        yield path, odd
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(parts):
        for where, replaced in changed(inner, (*path, key)):
            whole = copy.copy(value)
            whole[key] = replaced
            yield where, whole


def refusals(file: Path, number: int) -> Iterator[str]:
    """What each reader of the file says of it, if it does not take it. A report takes longer, and is made of
    every 23rd: of each odd value in turn."""
    readers: list[Callable[[], object]] = [lambda: described(file, MOST_ROWS)]
    if number % 23 == 0:
        readers.append(lambda: report_of(file.parent))
    for read in readers:
        try:
            read()
        except AflError as error:
            yield str(error)


@pytest.mark.parametrize(
    "more", but_long([{}, {"evaluation": {"rank_by": "auc"}}], {}), ids=["accuracy", "auc"]
)
def test_a_summary_of_odd_values(tmp_path: Path, more: dict[str, Any]) -> None:
    finished(tmp_path / "run", **more)
    path = tmp_path / "run" / "summary.json"
    for number, (where, value) in enumerate(changed(json.loads(path.read_bytes()))):
        path.write_text(json.dumps(value), encoding="utf-8")
        for said in refusals(path, number):
            assert str(path.parent) in said, (where, said)


def refusal_of_a_resume(run: FakeRun, metrics: Path) -> str:
    size = metrics.stat().st_size
    try:
        RunRecords.resume(run.run_id, metrics.parent, run.config, size).close()
    except StorageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("event", ["round", "evaluation"])
@pytest.mark.long
def test_metrics_of_odd_values(tmp_path: Path, event: str) -> None:
    run = finished(tmp_path / "run", evaluation={"rank_by": "auc"})
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next(index for index, line in enumerate(lines) if json.loads(line)["event"] == event)
    for count, (where, value) in enumerate(changed(json.loads(lines[number]))):
        text = "\n".join([*lines[:number], json.dumps(value), *lines[number + 1 :]]) + "\n"
        path.write_text(text, encoding="utf-8")
        for said in refusals(path, count):
            assert str(path) in said, (where, said)
        if said := refusal_of_a_resume(run, path):
            assert f"{path}, line {number + 1}: no line of metrics" in said, (where, said)


def test_a_line_is_named_by_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "loss_mean": "much"})
    path.write_text("\n".join(lines), encoding="utf-8")
    for command in (["inspect", str(path)], ["inspect", str(path.parent)], ["report", str(path.parent)]):
        assert main(command) == ExitCode.DATA
        assert f"{path}:2: damaged, or of another version of afl: loss_mean: " in capsys.readouterr().err
