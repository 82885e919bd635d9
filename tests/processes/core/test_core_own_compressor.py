"""The compressor that docs/compressors.md shows, installed as the page says, through a real run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.packages import install, shown_points
from support.pages import blocks

PAGE = "docs/compressors.md"
KIT = Path(__file__).parents[2] / "unit" / "core"
"""Where ``core_federation`` lies."""

RUN = """
import numpy as np
from core_federation import Federation, Problem

from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.compressors import create
from afl.config import config_from_mapping
from afl.errors import ConfigError
from afl.core.randomness import Purpose, SharedRandomness
from afl.wire.settings import RunSettings


def settings_of(**uplink):
    algorithm = {"name": "afl-com", "rounds": 6, "block": 6, "eta_w": 0.02, "eta_q": 0.0}
    return RunSettings.of_config(config_from_mapping({
        "workers": 3,
        "task": {"name": "synthetic"},
        "algorithm": {**algorithm, "uplink": {"name": "window", "share": 0.2, **uplink}},
    })).parameters


settings = settings_of()
assert settings.uplink == settings.downlink == CompressorChoice("window", {"share": 0.2})
problem = Problem.random(3, 31)
outcome = Federation(problem, settings, evaluate_every=2, chaos=1, seed=7).run()
assert all(evaluation.diverged == () for evaluation in outcome.evaluations)

w, e = problem.start.copy(), np.zeros((3, 31), np.float32)
for t in range(1, 7):
    start = SharedRandomness.from_int(7).stream(Purpose.COMPRESSOR, t).integer(31)
    window = np.isin(np.arange(31), (start + np.arange(6)) % 31)
    total = np.zeros(31, np.float32)
    for i in range(3):
        p = e[i] + np.float32(1 / 3) * problem.gradient(i, t, w)
        total[window] += p[window]
        e[i] = np.where(window, 0, p)
    w = w - np.float32(0.02) * total
for model in (outcome.server, *outcome.models):
    assert model.tobytes() == w.tobytes()
assert outcome.uplink_residuals.tobytes() == e.tobytes()
assert not outcome.downlink_residual.any()
assert create("window", 31, {"share": 0.2}).delta == 6 / 31

integers = Federation(problem, settings_of(bits=6), evaluate_every=2, chaos=1, seed=7).run()
assert all(evaluation.diverged == () for evaluation in integers.evaluations)
assert all(model.tobytes() == integers.server.tobytes() != w.tobytes() for model in integers.models)
assert not integers.downlink_residual.any()
try:
    settings_of(bits=33)
except ConfigError as error:
    assert "a whole number from 2 to 24" in str(error), error
else:
    raise AssertionError("33 bits were taken")
print("the page's compressor ran")
"""


def block(language: str) -> str:
    (found,) = blocks(PAGE, language)
    return found.text


def test_the_page_s_compressor_is_found_by_its_entry_point_and_runs(tmp_path: Path) -> None:
    (tmp_path / "window.py").write_text(block("python"), encoding="utf-8")
    paths = [install(tmp_path, "window", shown_points(PAGE))["PYTHONPATH"], str(KIT)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the page's compressor ran\n"


def test_with_its_options_checked_it_is_about_thirty_lines() -> None:
    code = [line for line in block("python").splitlines() if line.strip()]
    assert len(code) <= 36
