"""docs/guide.md: its configuration is one, and its commands do what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from afl.cli.main import main
from support import Federation
from support.identities import Pair, tls

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def commands(program: str) -> list[str]:
    """The commands of the guide that begin with it."""
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(f"{program} ")]


def test_a_site_may_keep_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's own commands and configuration; the worker's key is made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not on this machine")
    monkeypatch.chdir(tmp_path)
    first, _ = commands("afl certs")
    host = "federation.example.org"
    assert main([*first.removeprefix("afl ").replace(host, f"{host},localhost").split()]) == 0
    steps = [*commands("openssl req"), *commands("printf"), *commands("openssl x509")]
    assert len(steps) == 3
    for command in steps:
        subprocess.run(command, shell=True, check=True, capture_output=True)  # the guide's own
    (block,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(block)
    config["task"] = {"name": "synthetic", "batch_size": 8}
    config["algorithm"]["rounds"] = 5
    config["server"] |= {"listen": "localhost:0", "http": "127.0.0.1:0"}
    server = Pair(tmp_path / "certs/server.pem", tmp_path / "certs/server.key")
    config["server"]["tls"] = tls(server, tmp_path / "certs/ca.pem")
    config["run"]["directory"] = str(tmp_path / "federation" / "run")
    made = Pair(tmp_path / "worker-0.pem", tmp_path / "worker-0.key")
    sent = [
        Pair(tmp_path / f"certs/worker-{number}.pem", tmp_path / f"certs/worker-{number}.key")
        for number in (1, 2)
    ]
    with Federation(config, tmp_path / "federation") as federation:
        where = f"localhost:{federation.port}"
        trusted = ("--ca", str(tmp_path / "certs/ca.pem"))
        outside = federation.start("1", *trusted, *made.worker_options, server=where)
        outside.expect(3)
        assert "speaks for worker 0, not for worker 1" in outside.text
        for worker, pair in enumerate((made, *sent)):
            federation.start(str(worker), *trusted, *pair.worker_options, server=where)
        federation.finish()


def test_the_units_read_what_the_guide_writes() -> None:
    units = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "deploy/systemd").iterdir())
    for path in sorted(set(re.findall(r"/etc/afl/[\w.-]+", units))):
        name = path.removeprefix("/etc/afl/").replace("worker-", "worker-N")
        assert path in GUIDE or name in GUIDE, path
    assert "/opt/afl/bin" in GUIDE
    assert "/opt/afl/bin" in units
