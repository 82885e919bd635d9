"""``python -m afl_benchmarks.growth``, on a problem that takes a moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from afl_benchmarks.growth import FIGURE, METHODS, RESULTS, TABLE, read


def test_the_command_computes_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    # In a process of its own, since matplotlib keeps its fonts' files open.
    small = ["--outliers", "1", "--noise", "0", "--seeds", "1", "--most", "60"]
    command = [sys.executable, "-m", "afl_benchmarks.growth", "--out", str(tmp_path), *small]
    subprocess.run([*command, "--workers", "4"], check=True, capture_output=True)
    first = (tmp_path / RESULTS).read_text()
    subprocess.run([*command, "--workers", "4", "8"], check=True, capture_output=True)
    again = (tmp_path / RESULTS).read_text()
    assert again.startswith(first)
    assert [(result.workers, result.method) for result in read(tmp_path / RESULTS)] == [
        (workers, method) for workers in (4, 8) for method in METHODS
    ]
    assert (tmp_path / f"{FIGURE}.png").read_bytes().startswith(b"\x89PNG")
    assert "| m = 4 | m = 8 |" in (tmp_path / TABLE).read_text()
