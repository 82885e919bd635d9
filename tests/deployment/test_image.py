"""The server's image, built: how large it is, what a change of afl ships again, and that it starts."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deployment_manifests import ROOT
from deployment_pods import CONTAINERFILE

WHEEL = Path(os.environ.get("AFL_TORCH_WHEEL", "nothing"))
"""PyTorch's build for CPUs and Debian's Python, which is taken instead of its index's."""

IMAGE_BYTES, CHANGE_BYTES = 700e6, 5e6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (shutil.which("buildah") and shutil.which("debootstrap") and os.geteuid() == 0),
        reason="only root can build an image, with buildah and debootstrap",
    ),
    pytest.mark.skipif(not WHEEL.is_file(), reason="AFL_TORCH_WHEEL names no wheel of PyTorch"),
]

Buildah = Callable[..., str]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    # Not below pytest's own folder, which keeps the last three runs': each is of several gigabytes.
    with tempfile.TemporaryDirectory(prefix="afl-image-", dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def buildah(folder: Path) -> Buildah:
    options = ["--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "vfs"]

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(["buildah", *options, *arguments], check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout.strip()

    return run


@pytest.fixture(scope="module")
def base(folder: Path, buildah: Buildah) -> str:
    """Debian with its Python, as an image."""
    debian = folder / "debian"
    suite = {"cp311": "bookworm", "cp313": "trixie"}[WHEEL.name.split("-")[2]]
    packages = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", packages, suite, debian], check=True)
    (debian / "usr/bin/python").symlink_to("python3")
    container = buildah("from", "scratch")
    buildah("add", container, debian, "/")
    buildah("commit", container, "localhost/base")
    buildah("rm", container)
    shutil.rmtree(debian)
    return "localhost/base"


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    """A copy of what goes into a build, with the version of the wheel."""
    copy = folder / "source"
    left_out = shutil.ignore_patterns(".git", ".venv*", "tests", "docs", "benchmarks", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    release = WHEEL.name.split("-")[1].partition("+")[0]
    pinned = [f"torch=={release}" if line.startswith("torch==") else line for line in constraints]
    (copy / "constraints.txt").write_text("\n".join(pinned), encoding="utf-8")
    index = folder / "index" / "torch"
    index.mkdir(parents=True)
    shutil.copy(WHEEL, index)
    (index / "index.html").write_text(f'<a href="{WHEEL.name.replace("+", "%2B")}">{WHEEL.name}</a>')
    return copy


def build(folder: Path, buildah: Buildah, base: str, name: str) -> dict[str, int]:
    """Build the server's image; its layers, the base's first, by their files, and their unpacked bytes."""
    buildah(
        *("build", "--isolation", "chroot", "--layers", "--target", "server", "--tag", f"localhost/{name}"),
        *("--file", folder / "source" / CONTAINERFILE.relative_to(ROOT)),
        *("--build-arg", f"PYTHON_IMAGE={base}", "--build-arg", "SERVER_TORCH_INDEX=file:///index"),
        *("--volume", f"{folder}/index:/index:ro", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"),
        folder / "source",
    )
    buildah("push", "--disable-compression", f"localhost/{name}", f"dir:{folder}/{name}")
    manifest = json.loads((folder / name / "manifest.json").read_text(encoding="utf-8"))
    return {layer["digest"].removeprefix("sha256:"): layer["size"] for layer in manifest["layers"]}


def test_an_image_is_small_and_a_change_of_afl_ships_little(
    folder: Path, buildah: Buildah, base: str, source: Path
) -> None:
    first = build(folder, buildah, base, "first")
    own = list(first.values())[1:]
    assert sum(own) <= IMAGE_BYTES, own
    with (source / "common/afl/errors.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    second = build(folder, buildah, base, "second")
    changed = [folder / "second" / layer for layer in second if layer not in first]
    assert changed
    shipped = [len(gzip.compress(layer.read_bytes())) for layer in changed]
    assert sum(shipped) <= CHANGE_BYTES, shipped

    about = json.loads(buildah("inspect", "--type", "image", "localhost/second"))["OCIv1"]["config"]
    assert about["Labels"]["org.opencontainers.image.title"] == "afl-server"
    container = buildah("from", "localhost/second")
    inside = ("run", "--isolation", "chroot", container, "--")
    assert buildah(*inside, "afl-server", "--help").startswith("usage: afl-server")
    assert "afl-server" in buildah(*inside, "afl-server", "--version")
    bill = json.loads(buildah(*inside, "cat", "/opt/afl/share/afl/sbom.cdx.json"))
    assert "torch" in {one["name"] for one in bill["components"]}
    imported = "import afl_server.runner.run, importlib.util as u; print(u.find_spec('pip'))"
    assert buildah(*inside, "/opt/afl/bin/python", "-c", imported) == "None"
