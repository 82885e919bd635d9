"""Simulated runs told to the real libraries, and read back with their own readers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from afl.config import config_from_mapping, dump_config
from afl.errors import ConfigError
from afl.runs.tracking.lines import numbers_of
from afl.runs.tracking.tracker import load_trackers

pytestmark = pytest.mark.timeout(400)
"""The libraries take many seconds to import, and more on a busy machine."""

SETTINGS: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic"},
    "algorithm": {"name": "afl-br", "rounds": 20, "eta_w": 0.01, "eta_q": 0.1},
    "evaluation": {"every": 5},
}

SIMULATE = """
import sys
from pathlib import Path
from afl.config import load_config
from afl_lab.simulation.run import simulate

tried = []

def audit(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        host = str(arguments[1][0])
        if host not in ("127.0.0.1", "::1", "localhost"):
            tried.append(host)
    if event == "socket.getaddrinfo" and arguments[0] not in (None, "127.0.0.1", "::1", "localhost"):
        tried.append(str(arguments[0]))

sys.addaudithook(audit)
summary = simulate(load_config(sys.argv[1], environment={}), Path(sys.argv[2]))
assert summary["result"] == "ok", summary
assert not tried, f"the network was used: {tried}"
"""
"""In a process of its own, which ends as a user's does, and which notes whom it connects to."""


def requires(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def run_of(folder: Path, *trackers: str, **environment: str) -> Path:
    config = config_from_mapping({**SETTINGS, "run": {"seed": 3, "trackers": list(trackers)}})
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "WANDB_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIMULATE, "run.yaml", "run"],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tracker" not in done.stderr, done.stderr
    return folder / "run"


def event_accumulator() -> Any:
    """TensorBoard's own reader."""
    return importlib.import_module("tensorboard.backend.event_processing.event_accumulator")


def expected(run: Path) -> dict[str, dict[int, float]]:
    """What the metrics say, by a tracker's names, then by round."""
    found: dict[str, dict[int, float]] = {}
    for text in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        for name, value in numbers_of(line).items():
            found.setdefault(name, {})[line["round"]] = value
    return found


def test_tensorboard(tmp_path: Path) -> None:
    requires("tensorboard")
    run = run_of(tmp_path, "tensorboard")
    events = event_accumulator().EventAccumulator(
        str(run / "trackers" / "tensorboard"), size_guidance={"scalars": 0}
    )
    events.Reload()
    wanted = expected(run)
    assert set(events.Tags()["scalars"]) == set(wanted)
    assert len(wanted["round/loss_max"]) == 20
    for name, values in wanted.items():
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == list(values)
        assert [scalar.value for scalar in scalars] == pytest.approx(list(values.values()), rel=1e-6)
    assert "config/text_summary" in events.Tags()["tensors"]


READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("afl")
(found,) = client.search_runs([experiment.experiment_id])
history = {
    name: [[metric.step, metric.value] for metric in client.get_metric_history(found.info.run_id, name)]
    for name in found.data.metrics
}
print(json.dumps([found.info.status, found.data.tags, found.data.params, history]))
"""

READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2 as pb

def records(data):
    # LevelDB's log: blocks of 32 KiB, of parts with checksum, length and kind; a header of 7 bytes first.
    at, whole = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""

rows, run_id = [], None
for data in records(open(sys.argv[1], "rb").read()):
    record = pb.Record()
    record.ParseFromString(data)
    if record.WhichOneof("record_type") == "run":
        run_id = record.run.run_id
    if record.WhichOneof("record_type") == "history":
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        rows.append({key: json.loads(value) for key, value in items.items()})
print(json.dumps([run_id, rows]))
"""


def read_by(source: str, argument: str) -> Any:
    """What a program prints as JSON at its end; in a process of its own, since libraries leave threads."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, argument],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def mlflow_of(run: Path) -> Any:
    """Status, tags, parameters and history of the one MLflow run."""
    return read_by(READ_MLFLOW, f"sqlite:///{run / 'trackers' / 'mlflow' / 'mlflow.db'}")


def wandb_of(run: Path) -> list[Any]:
    """Run id and history of each offline run, in the order of their beginning."""
    return [
        read_by(READ_WANDB, str(file))
        for file in sorted((run / "trackers").glob("wandb/wandb/offline-run-*/*.wandb"))
    ]


def test_mlflow(tmp_path: Path) -> None:
    requires("mlflow", "sqlalchemy", "alembic")
    run = run_of(tmp_path, "mlflow")
    status, tags, params, history = mlflow_of(run)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert status == "FINISHED"
    assert tags["afl.run_id"] == summary["run_id"]
    assert params["algorithm.eta_w"] == "0.01"
    wanted = expected(run)
    assert set(history) == set(wanted)
    for name, values in wanted.items():
        assert sorted(history[name]) == [[step, pytest.approx(value)] for step, value in values.items()]


def test_wandb_offline(tmp_path: Path) -> None:
    requires("wandb")
    run = run_of(tmp_path, "wandb")
    ((run_id, rows),) = wandb_of(run)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert run_id == summary["run_id"]
    assert [row["_step"] for row in rows] == list(range(1, 21))
    wanted = expected(run)
    for name, values in wanted.items():
        assert {row["_step"]: row[name] for row in rows if name in row} == pytest.approx(values)


FOLLOW = """
import sys
from pathlib import Path
from afl.config import load_config
from afl.runs.tracking import following
from afl.runs.tracking.tracker import load_trackers

following.STOP_S = 300.0
config = load_config("run.yaml", environment={})
made = following.Following(load_trackers(config.run.trackers), "run-1", Path("run"), config)
made.start()
made.end(sys.argv[1])
assert set(made.failures.values()) == {0}, made.failures
"""


def follow_twice(folder: Path, name: str) -> Path:
    """A run that is stopped in round 5, whose last rounds are made again, and that then ends."""
    config = config_from_mapping({**SETTINGS, "run": {"seed": 3, "trackers": [name]}})
    (folder / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    run = folder / "run"
    run.mkdir()
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "WANDB_"))
    }
    for rounds, status in ((5, "stopped"), (9, "finished")):
        lines = [{"event": "round", "round": r, "loss_max": 1 / r} for r in range(1, rounds + 1)]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (run / "metrics.jsonl").write_text(text, encoding="utf-8")
        command = [sys.executable, "-W", "ignore", "-c", FOLLOW, status]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return run


def test_mlflow_goes_on_with_its_run(tmp_path: Path) -> None:
    requires("mlflow", "sqlalchemy", "alembic")
    status, tags, _, history = mlflow_of(follow_twice(tmp_path, "mlflow"))
    assert (status, tags["afl.run_id"]) == ("FINISHED", "run-1")
    assert [step for step, _ in history["round/loss_max"]] == list(range(1, 10))


def test_wandb_goes_on_under_the_same_id(tmp_path: Path) -> None:
    requires("wandb")
    parts = wandb_of(follow_twice(tmp_path, "wandb"))
    assert [run_id for run_id, _ in parts] == ["run-1", "run-1"]
    assert [row["_step"] for _, rows in parts for row in rows] == list(range(1, 10))


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_what_is_not_installed_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    message = rf"the package {name} is needed to .*: pip install 'afl\[{name}\]'"
    with pytest.raises(ConfigError, match=message):
        load_trackers([name])


def test_a_server_of_mlflow_that_is_not_there_costs_the_run_nothing(tmp_path: Path) -> None:
    requires("mlflow")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    config = config_from_mapping({**SETTINGS, "run": {"seed": 3, "trackers": ["mlflow"]}})
    (tmp_path / "run.yaml").write_text(dump_config(config), encoding="utf-8")
    settings = {
        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "NO_PROXY": "127.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIMULATE, "run.yaml", "run"],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tracker mlflow failed") == 1
    assert len(expected(tmp_path / "run")["round/loss_max"]) == 20
