"""A real run's trackers and exports while it goes on, when its server is killed, stopped, and at its end."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from afl.runs.files import read_model
from afl_cli.main import main
from support.federation import Federation
from support.packages import install

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard (afl[tensorboard]) is not installed"
)

ROUNDS = 160

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "tests_tasks:Slow", "options": {"pause": 0.01}, "batch_size": 8},
    "algorithm": {"name": "afl-br", "rounds": ROUNDS, "eta_w": 0.01, "eta_q": 0.1},
    "evaluation": {"every": 20},
    "server": {"checkpoint_every": 25, "heartbeat": "1s", "peer_timeout": "20s"},
}


def exported(federation: Federation, out: Path, *options: str) -> dict[str, Any]:
    """The card of what ``afl export`` makes of the run as it now is."""
    arguments = ["export", str(federation.directory), "--out", str(out), "--force", *options]
    assert main(arguments) == 0
    card: dict[str, Any] = json.loads((out / "card.json").read_text(encoding="utf-8"))
    return card


def steps(federation: Federation, name: str) -> list[int]:
    """The steps at which TensorBoard's own reader finds a value."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(
        str(federation.directory / "trackers" / "tensorboard"), size_guidance={"scalars": 0}
    )
    events.Reload()
    return [scalar.step for scalar in events.Scalars(name)]


def position(federation: Federation) -> int:
    path = federation.directory / "trackers" / "tensorboard" / "position.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["round"]) if path.exists() else 0


@pytest.mark.long
def test_a_run_that_is_killed_and_stopped_is_tracked_once_and_exported_in_every_state(
    tmp_path: Path,
) -> None:
    with Federation({**CONFIG, "run": {"trackers": ["tensorboard"]}}, tmp_path) as federation:
        federation.start("0-1", "--task", "tests_tasks:Slow", "--journal", str(tmp_path / "journal"))
        federation.wait_until(lambda _: position(federation) >= 20)
        card = exported(federation, tmp_path / "out", "--model", "best")
        assert card["run"]["state"] == "running"
        assert card["evaluation"]["round"] == card["model"]["round"] <= federation.status()["round"]
        address = federation.address
        handed_on = position(federation)
        federation.server.kill()
        assert exported(federation, tmp_path / "out", "--model", "best")["run"]["state"] == "unfinished"
        listen = ["--set", f"server.listen={address}"]
        federation.start_server(*listen)
        reopened = federation.server.wait_for("resumed")["round"]
        federation.wait_until(lambda status: status["round"] > position(federation) > reopened)
        federation.server.terminate()
        federation.server.expect(130)
        card = exported(federation, tmp_path / "out")
        assert card["run"]["state"] == "stopped"
        assert "can be resumed" in card["run"]["state_words"]
        federation.start_server(*listen)
        federation.finish()
        card = exported(federation, tmp_path / "out")
        assert card["run"]["state"] == "finished"
        assert card["model"]["digest"] == read_model(federation.directory / "model-final.safetensors").digest
        closed = [line["round"] for line in federation.records("round")]
        assert closed == list(range(1, ROUNDS + 1))
        logged = steps(federation, "round/loss_max")
        assert len(logged) == len(set(logged)), "a step was logged twice"
        # What was in the tracker's hands when its process was killed may be missing; it was killed once.
        assert all(handed_on < round_ < reopened for round_ in set(closed) - set(logged))
        assert logged[-1] == ROUNDS
        assert steps(federation, "evaluation/max_loss")[-1] == ROUNDS
        ended = federation.server.logged("tracker_ended", tracker="tensorboard")
        assert ended[0]["failures"] == 0


def test_a_run_that_is_aborted_can_be_exported(tmp_path: Path) -> None:
    config = {**CONFIG, "task": {"name": "tests_tasks:Diverging", "batch_size": 4}}
    with Federation(config, tmp_path) as federation:
        federation.start("0-1", "--task", "tests_tasks:Diverging")
        federation.server.expect(5)
        card = exported(federation, tmp_path / "out", "--description", "Four features.")
        assert card["run"]["state"] == "aborted"
        assert "(diverged)" in card["run"]["state_words"]
        assert card["data"]["description"] == "Four features."
        page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
        assert "No evaluation was made before this model was written." in page


TRACKER = """
import threading


class Hanging:
    def started(self, run):
        threading.Event().wait()

    def log(self, rounds): ...

    def ended(self, status): ...
"""


def test_a_tracker_that_hangs_holds_neither_the_rounds_nor_the_end_of_a_stopped_server(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "own_trackers.py").write_text(TRACKER, encoding="utf-8")
    environment = install(own, "own", {"afl.trackers": {"hanging": "own_trackers:Hanging"}})
    algorithm = {**CONFIG["algorithm"], "rounds": 5000}
    config = {**CONFIG, "run": {"trackers": ["hanging"]}, "algorithm": algorithm}
    with Federation(config, tmp_path / "federation", environment=environment) as federation:
        federation.start("0-1", "--task", "tests_tasks:Slow", "--journal", str(tmp_path / "journal"))
        federation.wait_until(lambda status: status["round"] >= 20)
        federation.server.terminate()
        federation.server.expect(130)
        (left,) = federation.server.logged("tracker_left")
        assert left["tracker"] == "hanging"
        assert federation.summary()["result"] == "interrupted"
