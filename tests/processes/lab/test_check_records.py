"""What ``afl check`` says of a run that protects each record; a simulation of it says what it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from afl.config import config_from_mapping
from afl.errors import ExitCode
from afl_cli.main import main
from afl_lab.check import check_config

CONFIG = {
    "workers": 2,
    "task": {"name": "digits", "batch_size": 32},
    "algorithm": {"name": "afl-com", "rounds": 4, "eta_w": 0.1, "eta_q": 0.1},
    "privacy": {"records": {"epsilon": 8.0, "delta": 1e-5}},
    "worker": {"journal": "machine"},
    "run": {"seed": 1},
}


@pytest.mark.long
def test_a_check_tells_epsilon_noise_time_and_memory() -> None:
    report = check_config(config_from_mapping(CONFIG))
    assert not report.errors
    found = report.values["records"]
    assert 7.9 < found["epsilon"] <= 8.0
    assert found["gradient_seconds"] > 0
    assert found["noise_norm"] == pytest.approx(found["noise"] * 6762**0.5 / 32)
    assert {"epsilon", "noise", "time", "memory"} <= report.facts["Record-level privacy"].keys()


def test_a_check_refuses_a_delta_that_protects_nothing() -> None:
    loose = {**CONFIG, "privacy": {"records": {"epsilon": 8.0, "delta": 0.1}}}
    report = check_config(config_from_mapping(loose))
    assert report.errors
    assert any("is above 1/" in found.what for found in report.findings)


@pytest.mark.long
def test_a_simulation_says_that_it_is_not_private_and_does_not_repeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # To find the noise for an epsilon takes seconds.
    config = {**CONFIG, "privacy": {"records": {"noise": 1.0, "delta": 1e-5}}}
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(config))
    for name in ("a", "b"):
        assert main(["simulate", str(tmp_path / "server.yaml"), "--out", str(tmp_path / name)]) == ExitCode.OK
        said = " ".join(capsys.readouterr().out.split())
        assert "A simulation is not private" in said
        assert "these runs cannot be repeated to the bit" in said
    one, other = (
        next((tmp_path / name).rglob("model-final.safetensors")).read_bytes() for name in ("a", "b")
    )
    assert one != other
