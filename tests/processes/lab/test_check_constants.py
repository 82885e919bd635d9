"""Estimates of smoothness and of the loss's deviation, where both are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import afl
from afl.core.randomness import SharedRandomness
from afl.errors import ExitCode
from afl.tasks.initialization import build_vector
from afl_cli.main import main
from afl_lab.check import check_config
from afl_lab.check.checker import configured
from afl_lab.check.constants import deviation_of, smoothness_of
from afl_worker.training.oracle import TaskOracle

CURVATURES = torch.tensor([0.5, 3.0, 7.0])


class Quadratic(afl.Task):
    """Half of w' C w, and the mean of what the batch holds: curvature 7, deviation 1 / sqrt(batch)."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1, bias=False)

    def data(self, worker: int, context: afl.TaskContext) -> afl.WorkerData:
        x = torch.randn((4_000, 1), generator=torch.Generator().manual_seed(worker))
        return afl.WorkerData(train=(x,), test=(x[:5],))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (weight,) = model.parameters()
        return 0.5 * (CURVATURES * weight.square()).sum() + batch[0].mean()

    def metrics(self, model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
        return {"loss": self.loss(model, batch).detach()}


def test_of_a_quadratic() -> None:
    task, randomness = Quadratic(), SharedRandomness.from_int(1)
    vector = build_vector(task, randomness)
    data = {0: task.data(0, afl.TaskContext(1, randomness))}
    oracle = TaskOracle(task, vector, data, randomness, batch_size=16, evaluation_batch_size=16)
    before = vector.values.clone()
    assert smoothness_of(vector, oracle, 0) == pytest.approx(7.0, rel=0.02)
    assert torch.equal(vector.values, before)
    assert deviation_of(oracle, 0) == pytest.approx(1 / math.sqrt(16), rel=0.25)


@pytest.mark.long
def test_theory_takes_what_check_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, file = tmp_path / "server.yaml", tmp_path / "constants.json"
    config.write_text(
        "workers: 3\ntask: {name: synthetic, options: {dim: 60}}\n"
        "algorithm: {name: afl-br, rounds: 100, eta_w: 0.1, eta_q: 0.1}\n"
    )
    assert main(["check", "--config", str(config), "--constants", str(file)]) == ExitCode.OK
    assert "Constants of the theory" in capsys.readouterr().out
    found = json.loads(file.read_text())
    report = check_config(configured(config, None, None), constants=True)
    assert report.values["constants"] == found
    assert found["dim"] == 60
    assert main(["theory", "--workers=3", "--rounds=100", "--constants", str(file), "--json"]) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["constants"] == {"smoothness": found["smoothness"], "sigma_q": found["sigma_q"]}
    assert answer["dim"] == 60
    assert answer["step_sizes"]["eta_w"] == pytest.approx(1 / (8 * found["smoothness"] * 100**0.75))


def test_what_is_given_comes_before_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "constants.json"
    file.write_text('{"smoothness": 2.0, "sigma_q": 0, "dim": 5}')
    size = ["theory", "--workers=3", "--rounds=100", "--constants", str(file), "--json"]
    assert main([*size, "--smoothness=4"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["constants"] == {"smoothness": 4.0, "sigma_q": None}
    for wrong in ("{}", "no JSON", '{"smoothness": -1, "sigma_q": 1, "dim": 5}'):
        file.write_text(wrong)
        assert main(size) == ExitCode.CONFIG
        assert "afl check --config FILE --constants FILE writes it" in capsys.readouterr().err
    file.unlink()
    assert main(size) == ExitCode.CONFIG
    assert "No such file" in capsys.readouterr().err
