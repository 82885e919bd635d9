"""A run whose state is sealed: killed and resumed, and with state that somebody else has made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from afl.daemon.fault_points import VARIABLE
from afl.errors import ExitCode
from afl.runs.durable import read_record, record_head
from support import Federation, Proxy, run_together

CONFIG: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 60,
        "eta_w": 0.9,
        "eta_q": 0.3,
        "uplink": {"name": "top-k", "ratio": 0.2},
    },
    "evaluation": {"every": 20},
}


def sealed(folder: Path, key: str = "k" * 64) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "integrity.key"
    path.touch(mode=0o600)
    path.write_text(f"{key}\n", encoding="utf-8")
    return {**CONFIG, "server": {"integrity_key": str(path), "checkpoint_every": 10}}


def test_a_server_that_is_killed_goes_on_with_its_key(tmp_path: Path) -> None:
    """In the middle of a checkpoint, of an outcome, and while it replays."""
    undisturbed = run_together({**CONFIG, "run": {"seed": 7}}, tmp_path / "open", ["0", "1"])
    config = {**sealed(tmp_path), "run": {"seed": 7}}
    with Proxy() as door, Federation(config, tmp_path / "sealed") as federation:
        federation.server.kill()
        for point in ("server.mid-checkpoint:3", "server.mid-log:9", "server.mid-replay:2", ""):
            environment = {VARIABLE: f"{point}:kill"} if point else {}
            federation.start_server(environment=environment)
            if point != "server.mid-replay:2":
                door.aim(federation.port)
            if not federation.workers:
                for worker in "01":
                    federation.start(worker, server=door.address)
            if point:
                federation.server.expect(-9)
        federation.finish()
        assert not federation.server.logged("rounds_lost")
    assert federation.model_bytes() == undisturbed.model_bytes()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a federation whose server was killed in round 34 and is sealed."""
    folder = tmp_path_factory.mktemp("stopped")
    environment = {VARIABLE: "server.before-log:35:kill"}
    with Federation(sealed(folder), folder / "federation", environment=environment) as federation:
        for worker in "01":
            federation.start(worker, "--give-up-after", "60s")
        federation.server.expect(-9)
        assert len(list((federation.directory / "state").glob("checkpoint-*[0-9]"))) == 2
    return folder


def remake(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A checkpoint with other content, and the checksums that this has."""
    record = read_record(memoryview(path.read_bytes()))
    values = json.loads(json.dumps(record.values))
    change(values)
    sections = [bytes(section) for section in record.sections]
    path.write_bytes(b"".join([record_head(values, sections), *sections]))


def evil(values: dict[str, Any]) -> None:
    values["config"] = values["config"].replace("eta_w: 0.9", "eta_w: 0.001")


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        ("all checkpoints remade", ExitCode.STORAGE, "is whole: restore the folder from a backup"),
        ("another key", ExitCode.STORAGE, "is whole: restore the folder from a backup"),
        ("no key given", ExitCode.STORAGE, "is sealed: give the key that it was written with"),
        ("no key there", ExitCode.CONFIG, "cannot be read"),
        ("a key that is a folder", ExitCode.CONFIG, "cannot be read"),
        ("a short key", ExitCode.CONFIG, "a key has at least 32: openssl rand -hex 32"),
        ("a key beside the state", ExitCode.CONFIG, "lies in the run's directory"),
        ("a key that is linked there", ExitCode.CONFIG, "lies in the run's directory"),
    ],
)
def test_what_is_not_sealed_with_the_key_is_refused(
    stopped: Path, tmp_path: Path, case: str, code: ExitCode, said: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(stopped / "federation" / "run", folder / "run")
    config = sealed(tmp_path)
    key, inside = Path(config["server"]["integrity_key"]), folder / "run" / "key"
    checkpoints = sorted((folder / "run" / "state").glob("checkpoint-*[0-9]"))
    before = {path.name: path.read_bytes() for path in checkpoints}
    match case:
        case "all checkpoints remade":
            for path in checkpoints:
                remake(path, evil)
            before = {path.name: path.read_bytes() for path in checkpoints}
        case "another key":
            key.write_text("o" * 64, encoding="utf-8")
        case "no key given":
            del config["server"]["integrity_key"]
        case "no key there":
            key.unlink()
        case "a key that is a folder":
            config["server"]["integrity_key"] = str(tmp_path)
        case "a short key":
            key.write_text("k" * 31 + "\n", encoding="utf-8")
        case "a key beside the state":
            config["server"]["integrity_key"] = str(shutil.copy(key, inside))
        case "a key that is linked there":
            shutil.copy(key, inside)
            key.unlink()
            key.symlink_to(inside)
    with Federation(config, folder) as federation:
        federation.server.expect(code)
        assert said in federation.server.text
        assert "Traceback" not in federation.server.text
    assert {path.name: path.read_bytes() for path in checkpoints} == before, "nothing was touched"


def test_one_remade_checkpoint_costs_nothing_and_a_key_that_all_can_read_is_told(
    stopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped / "federation" / "run", tmp_path / "run")
    config = sealed(tmp_path)
    Path(config["server"]["integrity_key"]).chmod(0o644)
    newest = max((tmp_path / "run" / "state").glob("checkpoint-*[0-9]"))
    remake(newest, evil)
    with Federation(config, tmp_path) as federation:
        federation.server.wait_for("listening")
        assert federation.server.logged("checkpoint_damaged", file=newest.name)
        assert federation.server.logged("secret_is_readable", file=config["server"]["integrity_key"])
        (line,) = federation.server.logged("resumed")
        assert line["round"] == 34


def test_there_is_nothing_to_seal_without_state(tmp_path: Path) -> None:
    config = sealed(tmp_path)
    config["server"]["state"] = "off"
    with Federation(config, tmp_path / "off") as federation:
        federation.server.expect(ExitCode.CONFIG)
        assert "server.integrity_key" in federation.server.text


def test_a_key_that_was_taken_out_of_the_runs_own_configuration_is_named_again(
    stopped: Path, tmp_path: Path
) -> None:
    """And what is not sealed may be changed."""
    shutil.copytree(stopped / "federation" / "run", tmp_path / "copy" / "run")
    directory, key = tmp_path / "copy" / "run", sealed(tmp_path)["server"]["integrity_key"]
    values = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    values["server"]["integrity_key"] = None
    (directory / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    metrics = directory / "metrics.jsonl"
    metrics.write_text(metrics.read_text(encoding="utf-8").replace('"loss_mean"', '"loss_lean"', 1))
    with Federation(sealed(tmp_path), tmp_path / "other") as federation:
        federation.start_resumed(directory).expect(ExitCode.STORAGE)
        assert "is sealed: give the key" in federation.server.text
        federation.start_resumed(directory, "--set", f"server.integrity_key={key}").wait_for("listening")
        assert federation.server.logged("resumed")


def test_an_older_state_of_the_run_is_resumed_from_and_told(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "federation" / "run", tmp_path / "run")
    state = tmp_path / "run" / "state"
    for kind in ("checkpoint", "log"):
        _, *newer = sorted(state.glob(f"{kind}-*[0-9]"))
        for path in newer:
            path.unlink()
    with Federation(sealed(tmp_path), tmp_path) as federation:
        federation.server.wait_for("listening")
        assert federation.server.logged("rounds_lost")
        (line,) = federation.server.logged("resumed")
        assert line["round"] < 34


def test_keys_of_access_that_somebody_has_changed_in_the_run_are_told(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "federation" / "run", tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values["server"]["insecure"] = True
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    with Federation(sealed(tmp_path), tmp_path / "other") as federation:
        for changed in (["server.insecure"], []):
            server = federation.start_resumed(tmp_path / "run")
            server.wait_for("listening")
            in_force, *told = server.logged("access_resumed")
            assert "server.insecure: True" in in_force["message"]
            assert [line["changed"] for line in told] == ([changed] if changed else [])
            assert not told or "server.insecure was off" in told[0]["message"]
            server.kill()
