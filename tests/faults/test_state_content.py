"""State whose checksums are right and whose content is not, resumed without an integrity key: one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afl.errors import ExitCode
from afl.runs.durable import read_record, record_head
from support import Federation

CONFIG: dict[str, Any] = {
    "workers": 1,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-com", "rounds": 1_000_000, "eta_w": 0.3, "eta_q": 0.3},
    "server": {"checkpoint_every": 20},
}

Values = dict[str, Any]


def changed(path: Path, change: Callable[[Values], object]) -> None:
    """The file's first record with other values and a right checksum; what follows it is gone."""
    record = read_record(memoryview(path.read_bytes()))
    values = dict(record.values)
    change(values)
    path.write_bytes(b"".join([record_head(values, record.sections), *record.sections]))


CHANGES: dict[str, Callable[[Values], object]] = {
    "no engine": lambda values: values.pop("engine"),
    "an engine of text": lambda values: values.update(engine="x"),
    "an engine of odd values": lambda values: values["engine"].update({key: [] for key in values["engine"]}),
    "no moment": lambda values: values.update(moment=None),
    "odd arrays": lambda values: values.update(arrays=[["params", "float99", [3]]]),
    "a sequence of text": lambda values: values.update(sequence="x"),
    "no length of the metrics": lambda values: values.update(
        {key: None for key in values if key not in {"format", "run_id", "sequence", "arrays", "layout"}}
    ),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed."""
    with Federation(CONFIG, tmp_path_factory.mktemp("killed") / "run") as federation:
        federation.start("0")
        federation.wait_until(lambda status: status["round"] >= 50)
        federation.server.kill()
    return federation.directory


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_of_odd_content_ends_a_resume_with_a_line(
    killed: Path, tmp_path: Path, change: str
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    for path in (tmp_path / "run" / "state").glob("checkpoint-*"):
        changed(path, CHANGES[change])
    with Federation(CONFIG, tmp_path) as federation:
        federation.server.expect(ExitCode.STORAGE)
        assert "from a backup" in federation.server.text
        assert "Traceback" not in federation.server.text


def test_an_outcome_of_odd_content_is_lost_and_told(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    for path in (tmp_path / "run" / "state").glob("log-*"):
        changed(path, lambda values: values.update(kind="odd"))
    with Federation(CONFIG, tmp_path) as federation:
        federation.server.wait_for("rounds_lost")
        federation.server.wait_for("listening")
        assert "its checksum is right and its content is not" in federation.server.text
