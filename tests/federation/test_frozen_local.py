"""``frozen = "local"``: a base model that each site has in a file of its own is compared, and never sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import afl
from afl.config import config_from_mapping
from afl.core.model.parameters import digest_of
from afl.errors import ExitCode
from afl.runs.export.export import export
from afl.runs.files import read_model
from afl_lab.simulation.run import simulate
from support import Federation, RawClient
from support.adapters import Adapted, write_base
from support.federation import free_port
from support.process import KIT

WORKERS, ROUNDS = 2, 6

SMALL = {"width": 16, "depth": 2}
LARGE = {"width": 1024, "depth": 12}


@pytest.fixture(autouse=True)
def _kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(KIT)


def config_of(base: Path, task: str = "Adapted", **algorithm: Any) -> dict[str, Any]:
    return {
        "workers": WORKERS,
        "task": {"name": f"adapters:{task}", "options": {"base": str(base), **SMALL}, "batch_size": 8},
        "algorithm": {"name": "afl-br", "rounds": ROUNDS, "eta_w": 0.1, "eta_q": 0.1, **algorithm},
        "evaluation": {"every": 3},
        "run": {"seed": 7},
    }


def run(config: dict[str, Any], folder: Path, base_of: Callable[[int], Path]) -> Federation:
    """Each worker with a base of its own."""
    with Federation(config, folder) as federation:
        for worker in range(WORKERS):
            options = ("--task", config["task"]["name"], "--task-option", f"base={base_of(worker)}")
            federation.start(str(worker), *options)
        federation.finish()
    return federation


def model_bytes(federation: Federation) -> int:
    """What the first models took on the wire."""
    kinds: dict[str, int] = federation.summary()["communication"]["downlink"]["wire_bytes_by_kind"]
    return kinds["model"]


def frozen_digest(base: Path) -> str:
    named = Adapted(str(base)).model().named_parameters()
    return digest_of(sorted((name, p) for name, p in named if not p.requires_grad))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "base.safetensors"
    write_base(path, **SMALL)
    return path


@pytest.mark.long
def test_nothing_of_the_base_is_sent_or_saved_and_the_result_is_the_same(base: Path, tmp_path: Path) -> None:
    copies = [tmp_path / f"site-{worker}.safetensors" for worker in range(WORKERS)]
    for copy in copies:
        copy.write_bytes(base.read_bytes())
    local = run(config_of(base), tmp_path / "local", copies.__getitem__)
    sent = run(config_of(base, "Sending"), tmp_path / "sent", copies.__getitem__)
    trained = local.model_bytes()
    assert set(trained) == {f"blocks.{block}.up.{name}" for block in range(2) for name in "ab"}
    assert trained == {name: sent.model_bytes()[name] for name in trained}
    adapters = sum(map(len, trained.values()))
    assert WORKERS * adapters < model_bytes(local) < WORKERS * (adapters + 200)
    assert model_bytes(sent) > WORKERS * sum(tensor.nbytes for tensor in load_file(base).values())
    assert not (local.directory / "state" / "frozen").exists()
    assert (sent.directory / "state" / "frozen").exists()
    simulate(config_from_mapping(config_of(base)), tmp_path / "simulation")
    simulated = load_file(tmp_path / "simulation" / "model-final.safetensors")
    assert trained == {key: tensor.numpy().tobytes() for key, tensor in sorted(simulated.items())}


def test_a_site_with_another_base_is_told_the_file_and_both_digests(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    tensors = load_file(base)
    tensors["head.bias"][0] += 1e-3
    save_file(tensors, other)
    with Federation(config_of(base), tmp_path / "federation") as federation:
        worker = federation.start("0", "--task", "adapters:Adapted", "--task-option", f"base={other}")
        worker.expect(ExitCode.DATA)
        # Of what the modules have, by the modules' names.
        ours, theirs = map(frozen_digest, (base, other))
        wanted = (
            f"the frozen parameters, which Adapted.model() loads here with --task-option base={other}, are "
            f"not the run's: their digest is {theirs}, the server's {ours}"
        )
        assert wanted in worker.text
        assert theirs in federation.server.text


def test_a_worker_that_does_not_compare_is_refused_by_the_server(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    with Federation(config_of(base), tmp_path) as federation, RawClient(federation.port) as client:
        welcome = client.join([0])
        assert welcome.frozen_digest
        client.send(ready=client.ready_message(welcome))
        assert f"this worker's digest is none, the run's {welcome.frozen_digest}" in client.goodbye().reason


@pytest.mark.long
def test_a_server_resumes_with_the_same_base_alone(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "base.safetensors"
    own.write_bytes(base.read_bytes())
    config = config_of(own, rounds=ROUNDS)
    config["server"] = {"listen": f"127.0.0.1:{free_port()}", "checkpoint_every": 1}
    with Federation(config, tmp_path / "federation") as federation:
        first = federation.start("0", "--task", "adapters:Adapted", "--task-option", f"base={own}")
        first.wait_for("joined")
        federation.server.kill()
        tensors = load_file(own)
        tensors["words.weight"][0, 0] += 1
        save_file(tensors, own)
        server = federation.start_server()
        server.expect(ExitCode.CONFIG)
        assert "the frozen parameters are not those that the run in" in server.text
        own.write_bytes(base.read_bytes())
        federation.start_server()
        federation.start("1", "--task", "adapters:Adapted", "--task-option", f"base={own}")
        federation.finish()
    simulate(config_from_mapping(config_of(own)), tmp_path / "simulation")
    simulated = load_file(tmp_path / "simulation" / "model-final.safetensors")
    assert federation.model_bytes() == {
        key: tensor.numpy().tobytes() for key, tensor in sorted(simulated.items())
    }


def test_an_export_has_the_adapters_and_can_have_the_base(base: Path, tmp_path: Path) -> None:
    simulate(config_from_mapping(config_of(base)), tmp_path / "run")
    card = export(tmp_path / "run", "final", tmp_path / "adapters")
    digest = read_model(tmp_path / "run" / "model-final.safetensors").metadata["frozen_digest"]
    assert card["model"]["frozen_digest"] == digest
    assert digest in (tmp_path / "adapters" / "README.md").read_text(encoding="utf-8")
    model = afl.load_model(tmp_path / "adapters", Adapted)
    named = ("final", tmp_path / "whole")
    with pytest.raises(afl.ConfigError, match="add --task adapters:Adapted"):
        export(tmp_path / "run", *named, with_base=True)
    whole = export(tmp_path / "run", *named, with_base=True, task="adapters:Adapted")
    assert "frozen_digest" not in whole["model"]
    joined = load_file(tmp_path / "whole" / "model.safetensors")
    state = model.state_dict()
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], state[name]) for name in state)
    assert torch.equal(joined["words.weight"], load_file(base)["words.weight"])
    other = tmp_path / "other.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(base).items()}, other)
    with pytest.raises(afl.DataError, match=f"the run's {digest}; give the task the same file"):
        afl.load_model(tmp_path / "adapters", Adapted, options={"base": str(other)})
    # What has the base needs none to be loaded.
    again = afl.load_model(tmp_path / "whole", Adapted, options={"base": str(other)})
    assert all(torch.equal(again.state_dict()[name], state[name]) for name in state)


@pytest.mark.slow
def test_of_a_base_of_a_hundred_million_nothing_travels(tmp_path: Path) -> None:
    base = tmp_path / "base.safetensors"
    assert write_base(base, **LARGE) > 100_000_000
    config = config_of(base)
    config["task"]["options"].update(LARGE)
    federation = run(config, tmp_path / "federation", lambda _: base)
    adapters = sum(map(len, federation.model_bytes().values()))
    assert adapters == 4 * 12 * 2 * (1024 + 4096)
    assert WORKERS * adapters < model_bytes(federation) < WORKERS * (adapters + 1000)
    communication = federation.summary()["communication"]
    for way in ("uplink", "downlink"):
        # The last round's update is sent with the evaluation that follows it.
        gradients = communication[way]["wire_bytes_by_kind"]["gradient"]
        assert ROUNDS - 1 <= gradients / (WORKERS * adapters) < 1.001 * ROUNDS, way
