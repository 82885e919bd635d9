"""The pages that a beginner reads, followed command by command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from shell import Shell

from support import Federation
from support.identities import Pair, tls
from support.pages import blocks

ROUNDS = 20


@pytest.mark.long
def test_the_readme(tmp_path: Path) -> None:
    shell = Shell(tmp_path, ROUNDS)
    shell.follow("README.md")
    assert [run.name for run in shell.runs] == ["first"]


@pytest.mark.parametrize(
    ("rounds", "accuracy"),
    [
        pytest.param(ROUNDS, 0.2, id="in short", marks=pytest.mark.long),
        pytest.param(None, 0.5, id="as it is", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
def test_the_first_hour(rounds: int | None, accuracy: float, tmp_path: Path) -> None:
    shell = Shell(tmp_path, rounds)
    shell.follow("docs/first-hour.md")
    assert len(shell.runs) >= 4
    for run in shell.runs:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        assert summary["last"]["worst_accuracy"] > accuracy, run
    # Separate processes of the same seed have made what afl run has.
    own, separate = (
        load_file(shell.folder / "runs" / name / "model-final.safetensors") for name in ("own", "separate")
    )
    assert {name: value.numpy().tobytes() for name, value in own.items()} == {
        name: value.numpy().tobytes() for name, value in separate.items()
    }


@pytest.mark.long
def test_the_page_on_privacy(tmp_path: Path) -> None:
    """Its five commands run a private federation, whose other workers start as the page says."""

    class Reader(Shell):
        def give(self, line: str) -> None:
            super().give(line)
            if line.startswith("afl-worker"):
                for worker in (1, 2):
                    another = re.sub(r"(--id |worker-|sent-)0", rf"\g<1>{worker}", line)
                    super().give(another)

    shell = Reader(tmp_path, ROUNDS)
    shell.follow("docs/privacy.md")
    assert [run.name for run in shell.runs] == ["private"]


def test_the_guide(tmp_path: Path) -> None:
    """Its commands make a federation's certificates, and a site's own key speaks for it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on this machine")
    shell = Shell(tmp_path, ROUNDS)
    shell.follow("docs/guide.md")
    certs = shell.top / "certs"
    config: dict[str, Any] = yaml.safe_load(blocks("docs/guide.md", "yaml")[0].text)
    config["task"] = {"name": "synthetic", "batch_size": 8}
    config["algorithm"]["rounds"] = 5
    config["server"] |= {"listen": "localhost:0", "http": "127.0.0.1:0"}
    config["server"]["tls"] = tls(Pair(certs / "server.pem", certs / "server.key"), certs / "ca.pem")
    config["run"]["directory"] = str(tmp_path / "federation" / "run")
    made = Pair(shell.top / "worker-0.pem", shell.top / "worker-0.key")
    sent = [Pair(certs / f"worker-{number}.pem", certs / f"worker-{number}.key") for number in (1, 2)]
    with Federation(config, tmp_path / "federation") as federation:
        where = f"localhost:{federation.port}"
        trusted = ("--ca", str(certs / "ca.pem"))
        outside = federation.start("1", *trusted, *made.worker_options, server=where)
        outside.expect(3)
        assert "speaks for worker 0, not for worker 1" in outside.text
        for worker, pair in enumerate((made, *sent)):
            federation.start(str(worker), *trusted, *pair.worker_options, server=where)
        federation.finish()
