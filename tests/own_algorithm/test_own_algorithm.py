"""A user's own algorithm in one file, installed as docs/own-algorithm.md says; its code is that file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import Federation, final_values, run_together
from support.commands import run_command
from support.packages import install, shown_points
from support.pages import ROOT, blocks
from support.process import KIT
from support.reference import MINIBATCH, Floats, _data, _oracle, _words, subset

PAGE = "docs/own-algorithm.md"
FILE = Path(__file__).with_name("sgda_momentum.py")
ROUNDS = 40
DIM = 50

CONFIG: dict[str, Any] = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": DIM}},
    "algorithm": {"name": "sgda-momentum", "rounds": ROUNDS, "eta_w": 0.3, "eta_q": 0.5, "momentum": 0.75},
    "evaluation": {"every": 20},
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with the package as an installer would leave it."""
    site = tmp_path_factory.mktemp("site")
    (site / FILE.name).write_bytes(FILE.read_bytes())
    return install(site, "sgda-momentum", shown_points(PAGE))


def reference(config: dict[str, Any]) -> Floats:
    """The model after all rounds, in plain numpy."""
    workers, algorithm = config["workers"], config["algorithm"]
    options = {"examples": 256, "scale": 1.0, "spread": 1.0, "noise_w": 0.5, "noise_q": 0.1}
    options |= config["task"]["options"]
    data = [_data(7, i, options) for i in range(workers)]
    w = np.full(options["dim"], 0.1, dtype=np.float32)
    v, q = np.zeros_like(w), np.full(workers, 1 / workers)
    for t in range(1, algorithm["rounds"] + 1):
        total, losses = np.zeros_like(w), np.zeros(workers)
        for i, (centre, zeta, signs) in enumerate(data):
            batch = subset(_words(7, MINIBATCH, t, i), len(zeta), config["task"]["batch_size"])
            losses[i], gradient = _oracle(w, centre, zeta[batch], signs[batch], options)
            total = total + np.float32(q[i]) * gradient
        v = np.float32(algorithm["momentum"]) * v + total
        w = w - np.float32(algorithm["eta_w"]) * v
        raised = q + algorithm["eta_q"] * losses
        # The projection onto the simplex: the largest k for which what is above theta is positive.
        descending = np.sort(raised)[::-1]
        thetas = (np.cumsum(descending) - 1) / np.arange(1, workers + 1)
        q = np.maximum(raised - thetas[descending > thetas][-1], 0)
    return w


def command(*arguments: str, installed: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = run_command("-m", *arguments, folder=folder, environment=installed)
    assert done.returncode == 0, done.stderr
    return done


def test_the_page_shows_the_file() -> None:
    (shown,) = blocks(PAGE, "python")
    assert shown.text == FILE.read_text(encoding="utf-8")
    assert len([line for line in shown.text.splitlines() if line.strip()]) <= 35


def test_federation_and_simulation_are_the_reference_to_the_bit(
    installed: dict[str, str], tmp_path: Path
) -> None:
    federation = run_together(CONFIG, tmp_path / "federation", ["0,2", "1"], environment=installed)
    right = reference(CONFIG).tobytes()
    assert final_values(federation.directory, DIM) == right
    assert reference({**CONFIG, "algorithm": {**CONFIG["algorithm"], "momentum": 0.0}}).tobytes() != right
    assert not federation.server.logged("digest_mismatch")

    config = federation.folder / "server.yaml"
    arguments = ("afl_cli", "simulate", str(config), "--out", str(tmp_path / "simulated"), "--seeds", "7")
    command(*arguments, installed=installed, folder=tmp_path)
    (model,) = (tmp_path / "simulated").rglob("model-final.safetensors")
    assert final_values(model.parent, DIM) == right


@pytest.mark.long
def test_a_killed_server_goes_on_to_the_bit(installed: dict[str, str], tmp_path: Path) -> None:
    config = {
        **CONFIG,
        "algorithm": {**CONFIG["algorithm"], "rounds": 400},
        "server": {"checkpoint_every": 7, "heartbeat": "100ms"},
    }
    with Federation(config, tmp_path / "run", environment=installed) as federation:
        for ids in ("0", "1-2"):
            federation.start(ids)
        for reached in (5, 100):
            federation.wait_until(lambda status, reached=reached: status["round"] >= reached)  # type: ignore[misc]
            port = federation.port
            federation.server.kill()
            federation.start_server("--set", f"server.listen=127.0.0.1:{port}")
        federation.finish()
    assert final_values(federation.directory, DIM) == reference(config).tobytes()


def test_a_worker_without_it_says_what_to_install(installed: dict[str, str], tmp_path: Path) -> None:
    with Federation(CONFIG, tmp_path / "run", environment=installed) as federation:
        worker = federation.start("0-2", environment={"PYTHONPATH": str(KIT)})
        worker.expect(2)
        assert (
            "the algorithm 'sgda-momentum' is not installed here: no entry point of that name is in the"
            in (worker.text)
        )
        assert "afl.algorithms" in worker.text
        federation.server.kill()


MISTAKES: list[tuple[dict[str, Any], str, list[str]]] = [
    ({"momentum": 1.5}, "momentum", ["found: 1.5", "accepted: a number from 0 to 1"]),
    ({"momentun": 0.5}, "momentun", ["found: 0.5, under an unknown key", "nearest: momentum"]),
    ({"block": 5}, "block", ["accepted: no block; sgda-momentum does not use it"]),
    ({"eta_q": None}, "eta_q", ["accepted: a step size on the dual weights; sgda-momentum needs it"]),
    ({"name": "sgda-momentun"}, "name", ["nearest: sgda-momentum"]),
    ({"name": "sgda"}, "momentum", ["found: 0.75, under an unknown key"]),
]

LOAD = """
import json, sys
from afl.config import config_digest, config_from_mapping
from afl.errors import ConfigError
for config in json.load(sys.stdin):
    try:
        print(json.dumps(config_digest(config_from_mapping(config))))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def changed(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "algorithm": {**CONFIG["algorithm"], **changes}}


def test_its_options_are_checked_and_part_of_the_digest_with_their_defaults(
    installed: dict[str, str],
) -> None:
    without = changed()
    del without["algorithm"]["momentum"]
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, **installed},
        input=json.dumps(
            [without, changed(momentum=0.9), CONFIG, *(changed(**changes) for changes, _, _ in MISTAKES)]
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    default, written, other, *found = map(json.loads, done.stdout.splitlines())
    assert default == written != other
    assert len(default) == 64
    for (_, key, parts), text in zip(MISTAKES, found, strict=True):
        lines = [" ".join(line.split()) for line in text.splitlines()]
        assert f"algorithm.{key}" in text
        for part in parts:
            assert any(part in line for line in lines), text


def test_the_help_describes_its_options(installed: dict[str, str], tmp_path: Path) -> None:
    text = command("afl_server", "--help-config", installed=installed, folder=tmp_path).stdout
    assert "algorithm.momentum" in text
    assert "sgda-momentum only" in " ".join(text.split())


def test_an_inspected_configuration_shows_them(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text(json.dumps(CONFIG), encoding="utf-8")
    text = command("afl_cli", "inspect", "server.yaml", installed=installed, folder=tmp_path).stdout
    assert "sgda-momentum, 40 rounds, momentum 0.75" in " ".join(text.split())


def test_the_page_is_in_the_site() -> None:
    assert PAGE.removeprefix("docs/") in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
