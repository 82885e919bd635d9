"""BatchNorm through real processes: hosting changes no bit, and the mean is what plain torch says."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from afl.config import config_from_mapping
from afl.core.randomness import SharedRandomness
from afl.tasks.base import TaskContext
from afl_lab.simulation.run import simulate
from support import Federation
from support.process import KIT
from support.reference import MINIBATCH, _words, subset
from support.tests_tasks import MeanNorm

WORKERS, ROUNDS, EVERY, BATCH, SEED = 4, 8, 4, 6, 7
APART = ["0", "1", "2", "3"]

AFL_BR = {"name": "afl-br", "eta_q": 0.1, "block": 100}
FEDAVG = {"name": "fedavg", "local_steps": 2}
DRFA = {"name": "drfa", "eta_q": 0.01, "local_steps": 2, "sampled": 3}
TOP_K = {"name": "afl-com", "eta_q": 0.1, "uplink": {"name": "top-k", "ratio": 0.3}}


def config_of(task: str, algorithm: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "workers": WORKERS,
        "task": {"name": f"tests_tasks:{task}", "batch_size": BATCH, "evaluation_batch_size": 4},
        "algorithm": {"rounds": ROUNDS, "eta_w": 0.05, **algorithm},
        "evaluation": {"every": EVERY},
    }


def run(config: Mapping[str, Any], folder: Path, groups: Sequence[str]) -> Federation:
    with Federation(config, folder) as federation:
        for ids in groups:
            federation.start(ids, "--task", config["task"]["name"])
        federation.finish()
        assert not federation.server.logged("digest_mismatch")
    return federation


def metrics_of(federation: Federation) -> list[list[dict[str, float]]]:
    return [line["workers"] for line in federation.records("evaluation")]


@pytest.mark.parametrize(
    ("task", "algorithm"),
    [
        pytest.param("LocalNorm", TOP_K, id="local, top-k"),
        pytest.param("LocalNorm", FEDAVG, id="local, fedavg", marks=pytest.mark.slow),
        pytest.param("LocalNorm", DRFA, id="local, drfa", marks=pytest.mark.slow),
        pytest.param("MeanNorm", DRFA, id="mean, drfa of b"),
    ],
)
def test_hosted_together_or_apart_the_results_are_the_same(
    task: str, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(task, algorithm)
    together, apart = (run(config, tmp_path / str(len(groups)), groups) for groups in (["0-3"], APART))
    for name in ("final", "random", "best"):
        assert together.model_bytes(name) == apart.model_bytes(name), name
    assert metrics_of(together) == metrics_of(apart)
    assert len(metrics_of(apart)) == 2


class Plain:
    """The federation in plain torch: a module for each worker, whose statistics are its own until averaged.

    Args:
        reborn: a worker and the round before which it is started anew, with the last mean.
    """

    def __init__(self, algorithm: Mapping[str, Any], reborn: tuple[int, int] | None = None) -> None:
        task = MeanNorm()
        with torch.random.fork_rng(devices=[]):
            module = task.model()
        self.modules = [copy.deepcopy(module) for _ in range(WORKERS)]
        context = TaskContext(WORKERS, SharedRandomness.from_int(SEED))
        self._data = [task.data(worker, context) for worker in range(WORKERS)]
        self.evaluations: list[list[float]] = []
        self.w = [parameter.detach().clone() for parameter in module.parameters()]
        self._mean = self.statistics(module)
        q = np.full(WORKERS, 1 / WORKERS)
        tau = algorithm.get("local_steps", 1)
        for t in range(1, ROUNDS + 1, tau):
            if reborn is not None and reborn[1] == t:
                self._renew(self.modules[reborn[0]])
            if algorithm["name"] == "fedavg":
                ends = [self._local(i, range(t, t + tau)) for i in range(WORKERS)]
                self.w = [torch.stack(parts).mean(dim=0) for parts in zip(*ends, strict=True)]
            else:
                answers = [self._gradient(i, t, self.w) for i in range(WORKERS)]
                for i, (_, gradients) in enumerate(answers):
                    self.w = [w - 0.05 * q[i] * g for w, g in zip(self.w, gradients, strict=True)]
                q = q * np.exp(algorithm["eta_q"] * np.array([loss for loss, _ in answers]))
                q /= q.sum()
            if (t + tau - 1) % EVERY == 0:
                self._evaluate()

    def statistics(self, module: nn.Module) -> list[torch.Tensor]:
        return [buffer for buffer in module.buffers() if buffer.dtype.is_floating_point]

    def _gradient(self, i: int, t: int, w: Sequence[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
        module = self._at(i, w).train()
        inputs, targets = self._data[i].train
        batch = torch.from_numpy(subset(_words(SEED, MINIBATCH, t, i), len(inputs), BATCH))
        loss = ((module(inputs[batch]) - targets[batch]) ** 2).mean()
        return loss.item(), list(torch.autograd.grad(loss, list(module.parameters())))

    def _local(self, i: int, updates: range) -> list[torch.Tensor]:
        w = self.w
        for t in updates:
            w = [part - 0.05 * g for part, g in zip(w, self._gradient(i, t, w)[1], strict=True)]
        return w

    def _evaluate(self) -> None:
        own = [self.statistics(module) for module in self.modules]
        self._mean = [torch.stack(parts).mean(dim=0) for parts in zip(*own, strict=True)]
        losses = []
        for i, module in enumerate(self.modules):
            self._renew(module)
            inputs, targets = self._data[i].test
            with torch.no_grad():
                losses.append(((self._at(i, self.w).eval()(inputs) - targets) ** 2).mean().item())
        self.evaluations.append(losses)

    def _renew(self, module: nn.Module) -> None:
        for buffer, mean in zip(self.statistics(module), self._mean, strict=True):
            buffer.copy_(mean)

    def _at(self, i: int, w: Sequence[torch.Tensor]) -> nn.Module:
        with torch.no_grad():
            for parameter, value in zip(self.modules[i].parameters(), w, strict=True):
                parameter.copy_(value)
        return self.modules[i]


def check(federation: Federation, plain: Plain) -> None:
    found = [[worker["loss"] for worker in metrics] for metrics in metrics_of(federation)]
    np.testing.assert_allclose(found, plain.evaluations, rtol=1e-5)
    module = MeanNorm().model()
    module.load_state_dict(federation.model("final"), strict=True)
    for parameter, w in zip(module.parameters(), plain.w, strict=True):
        torch.testing.assert_close(parameter.detach(), w, rtol=1e-5, atol=1e-6)
    right = plain.statistics(plain.modules[0])
    for buffer, statistic in zip(plain.statistics(module), right, strict=True):
        torch.testing.assert_close(buffer, statistic, rtol=1e-5, atol=1e-6)


def test_the_mean_is_that_of_plain_torch_and_a_simulation_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Frames of a few values each, some joined.
    config = {**config_of("MeanNorm", FEDAVG), "server": {"chunk_bytes": "4KiB"}}
    together = run(config, tmp_path / "together", ["0-3"])
    check(together, Plain(FEDAVG))
    apart = run(config, tmp_path / "apart", APART)
    assert apart.model_bytes() == together.model_bytes()
    assert metrics_of(apart) == metrics_of(together)

    monkeypatch.syspath_prepend(str(KIT))
    simulated = simulate(config_from_mapping({**config, "run": {"seed": SEED}}), tmp_path / "simulation")
    assert simulated["result"] == "ok"
    for direction in ("uplink", "downlink"):
        right, found = apart.summary()["communication"][direction], simulated["communication"][direction]
        for kind in ("gradient", "evaluation", "model"):
            assert found["wire_bytes_by_kind"][kind] == right["wire_bytes_by_kind"][kind], (direction, kind)
        for part in ("values", "indices", "scalars"):
            assert found["payload_bytes_by_part"][part] == right["payload_bytes_by_part"][part]
        assert found["float_equivalents"] == right["float_equivalents"]
    dim, size, synchronizations = 4 * 5 + 5 + 5 + 5 + 5 + 1, 10, ROUNDS // 2
    up, down = (apart.summary()["communication"][direction] for direction in ("uplink", "downlink"))
    # A mean's exchange is no more than its values in bytes, and nothing in the paper's floats.
    assert up["payload_bytes_by_part"]["values"] == WORKERS * 4 * (synchronizations * dim + 2 * size)
    assert up["float_equivalents"] == WORKERS * synchronizations * (dim + 1)
    # The first model and buffers, the models, and two means.
    assert down["payload_bytes_by_part"]["values"] == WORKERS * 4 * ((synchronizations + 1) * dim + 3 * size)
    assert down["float_equivalents"] == WORKERS * (synchronizations + 1) * dim


@pytest.mark.parametrize(
    ("journal", "reborn"),
    [pytest.param("process", None, id="its own"), pytest.param("off", (2, EVERY + 2), id="the mean")],
)
def test_a_worker_that_is_killed_has_its_own_statistics_or_without_a_journal_the_mean(
    tmp_path: Path, journal: str, reborn: tuple[int, int] | None
) -> None:
    config = {**config_of("Mortal", AFL_BR), "worker": {"journal": journal}}
    task = config["task"]["name"]
    with Federation(config, tmp_path) as federation:
        federation.start("0,1", "--task", task)
        federation.start("3", "--task", task)
        # In the second round after an evaluation, with statistics that are its own again.
        victim = federation.start("2", "--task", task, environment={"DIES_AT": str(EVERY + 2)})
        victim.wait()
        federation.start("2", "--task", task)
        federation.server.expect(0)
        for worker in federation.workers:
            if worker is not victim:
                worker.expect(0)
        assert not federation.server.logged("digest_mismatch")
    check(federation, Plain(AFL_BR, reborn=reborn))
    with pytest.raises(AssertionError):
        check(federation, Plain(AFL_BR, reborn=None if reborn else (2, EVERY + 2)))
