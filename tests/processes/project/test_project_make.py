"""What ``make`` installs, and what it says meanwhile; pip is a script that writes down how it is called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

MAKES = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}

PYTHON = """#!/bin/sh
echo "$@" >> "{calls}"
case "$*" in *--index-url*) exit {code} ;; esac
"""


def _executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def _installed(folder: Path, *arguments: str, code: int = 0, path: str = "") -> tuple[str, list[str]]:
    """What ``make demo`` prints, and how it calls pip; ``code`` is how PyTorch's own index answers."""
    calls = folder / "calls"
    _executable(folder / "venv" / "bin" / "python", PYTHON.format(calls=calls, code=code))
    _executable(folder / "venv" / "bin" / "afl", "#!/bin/sh\necho the demo\n")
    # The options and the depth of a make that runs these tests are its own.
    outside = {name: value for name, value in os.environ.items() if name not in MAKES}
    answer = subprocess.run(
        ["make", "demo", f"VENV={folder / 'venv'}", *arguments],
        cwd=ROOT,
        env={**outside, "PATH": f"{path}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.endswith("the demo\n")
    return answer.stdout, calls.read_text().splitlines()


def _versions(suffix: str) -> str:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    return " ".join(f"{name}=={pinned[name]}{suffix}" for name in ("torch", "torchvision"))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
class TestInstalling:
    def test_for_cpus_both_packages_come_from_pytorchs_index(self, tmp_path: Path) -> None:
        shown, (torch, rest) = _installed(tmp_path, "TORCH=cpu")
        assert "for a machine without an NVIDIA driver: make TORCH=cuda takes the other" in shown
        assert "could not" not in shown
        assert "--index-url https://download.pytorch.org/whl/cpu" in torch
        assert torch.endswith(_versions("+cpu"))
        assert rest.endswith("-c constraints.txt -e .[tasks]")
        # Nothing hides what pip shows of its progress.
        assert "--quiet" not in torch + rest

    def test_where_that_index_is_out_of_reach_it_says_so_and_goes_on(self, tmp_path: Path) -> None:
        shown, (_, rest) = _installed(tmp_path, "TORCH=cpu", code=1)
        assert "PyTorch is the usual index's build" in shown
        assert rest.endswith("-e .[tasks]")

    def test_with_a_driver_the_usual_build_is_taken(self, tmp_path: Path) -> None:
        _executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\n")
        shown, calls = _installed(tmp_path, path=f"{tmp_path / 'bin'}:")
        assert "for CPUs" not in shown
        assert len(calls) == 1

    def test_it_installs_once(self, tmp_path: Path) -> None:
        _installed(tmp_path, "TORCH=cpu")
        shown, calls = _installed(tmp_path, "TORCH=cpu")
        assert "Installing" not in shown
        assert len(calls) == 2
