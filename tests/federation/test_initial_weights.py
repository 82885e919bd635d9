"""A run that begins with another's model: workers get it by the wire, and a resumed server needs no file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from afl.config import config_from_mapping
from afl.core.randomness import SharedRandomness
from afl.runs.files import read_model
from afl.tasks.initialization import build_vector
from afl_lab.check import check_task
from afl_lab.simulation.run import simulate
from support import Federation
from support.federation import free_port
from support.process import KIT
from support.tests_tasks import MeanNorm

INTEGERS = {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "rand-k", "ratio": 0.3, "bits": 4}}

CASES: dict[str, dict[str, Any]] = {
    "integers": INTEGERS,
    "drfa": {"name": "drfa", "eta_q": 0.05, "local_steps": 2},
    "fedavg": {"name": "fedavg", "local_steps": 2},
}


@pytest.fixture(autouse=True)
def _kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(KIT)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with BatchNorm that has seen other data."""
    path = tmp_path_factory.mktemp("weights") / "trained.safetensors"
    vector = build_vector(MeanNorm(), SharedRandomness.from_int(1))
    vector.values.mul_(2)
    for name, buffer in vector.module.named_buffers():
        buffer.fill_(3 if name.endswith("tracked") else 0.25)
    save_file({name: tensor.clone() for name, tensor in vector.named_values().items()}, path)
    return path


def config_of(algorithm: dict[str, Any], weights: Path) -> dict[str, Any]:
    return {
        "workers": 3,
        "task": {"name": "tests_tasks:MeanNorm", "batch_size": 6},
        "algorithm": {"rounds": 12, "eta_w": 0.05, **algorithm},
        "evaluation": {"every": 4},
        "run": {"seed": 7, "initial_model": str(weights)},
    }


@pytest.mark.parametrize("case", CASES)
def test_a_federation_and_its_simulation_begin_with_the_file(
    case: str, weights: Path, tmp_path: Path
) -> None:
    config = config_of(CASES[case], weights)
    with Federation(config, tmp_path / "federation") as federation:
        for worker in range(3):
            federation.start(str(worker), "--task", "tests_tasks:MeanNorm")
        federation.finish()
        assert not federation.server.logged("digest_mismatch")
        (begun,) = federation.server.logged("initial_model")
    digest = read_model(weights).digest
    assert begun["digest"] == digest
    simulate(config_from_mapping(config), tmp_path / "simulation")
    for name in ("final", "random", "best"):
        simulated = load_file(tmp_path / "simulation" / f"model-{name}.safetensors")
        assert federation.model_bytes(name) == {
            key: tensor.numpy().tobytes() for key, tensor in sorted(simulated.items())
        }
        assert federation.model_metadata(name)["initial_model"] == digest


def test_with_no_step_the_model_of_a_run_is_the_files(weights: Path, tmp_path: Path) -> None:
    config = config_of({"name": "afl-br", "eta_w": 1e-30, "eta_q": 0.1, "rounds": 1}, weights)
    simulate(config_from_mapping(config), tmp_path / "run")
    wanted, found = load_file(weights), load_file(tmp_path / "run" / "model-final.safetensors")
    trained = [name for name in wanted if name.endswith(("weight", "bias"))]
    assert trained
    assert all(torch.allclose(wanted[name], found[name], rtol=0, atol=1e-20) for name in trained)


def test_a_resumed_server_needs_no_file_and_keeps_its_digest(weights: Path, tmp_path: Path) -> None:
    file = tmp_path / "moved.safetensors"
    file.write_bytes(weights.read_bytes())
    config = config_of({**INTEGERS, "rounds": 40}, file)
    config["task"]["name"] = "tests_tasks:SlowMeanNorm"
    config["server"] = {"listen": f"127.0.0.1:{free_port()}"}
    with Federation(config, tmp_path / "federation") as federation:
        for worker in range(3):
            federation.start(str(worker), "--task", config["task"]["name"])
        federation.wait_until(lambda status: status["round"] >= 5)
        federation.server.kill()
        file.unlink()
        federation.start_server()
        federation.finish()
        assert federation.server.logged("resumed")
        assert not federation.server.logged("initial_model")
    assert federation.model_metadata("final")["initial_model"] == read_model(weights).digest
    file.write_bytes(weights.read_bytes())
    simulate(config_from_mapping(config), tmp_path / "simulation")
    simulated = load_file(tmp_path / "simulation" / "model-final.safetensors")
    assert federation.model_bytes() == {
        key: tensor.numpy().tobytes() for key, tensor in sorted(simulated.items())
    }


def test_a_file_that_does_not_fit_ends_server_and_check_and_leaves_no_run(
    weights: Path, tmp_path: Path
) -> None:
    tensors = load_file(weights)
    name, tensor = next((n, t) for n, t in tensors.items() if t.dim() == 2)
    save_file({**tensors, name: tensor[:1].clone()}, tmp_path / "cut.safetensors")
    config = config_of(INTEGERS, tmp_path / "cut.safetensors")
    with Federation(config, tmp_path / "federation") as federation:
        federation.server.expect(7)
        wanted = f"{name} has the shape {list(tensor[:1].shape)}, and {list(tensor.shape)} in the model"
        assert wanted in federation.server.text
    assert not federation.directory.exists()
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    (error,) = check_task(path).of_level("error")
    assert wanted in str(error)
