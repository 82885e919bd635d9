"""The images, built: how large they are, what a change of afl ships again, and a run in them to its end."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from deployment_manifests import ROOT
from deployment_pods import CONTAINERFILE

WHEEL = Path(os.environ.get("AFL_TORCH_WHEEL", "nothing"))
"""PyTorch's build for CPUs and Debian's Python, which is taken instead of its index's."""
VISION_WHEEL = Path(os.environ.get("AFL_TORCHVISION_WHEEL", "nothing"))
"""The torchvision that belongs to it, for the worker's image."""

IMAGE_BYTES = {"server": 700e6, "worker": 1.2e9}
CHANGE_BYTES = 5e6
TARGETS = tuple(IMAGE_BYTES) if VISION_WHEEL.is_file() else ("server",)

LOG = logging.getLogger(__name__)

CONFIG = """workers: 2
task: {name: digits, batch_size: 32}
algorithm: {name: afl-com, rounds: 60, eta_w: 0.05, eta_q: 0.01, uplink: {name: top-k, ratio: 0.1}}
run: {directory: run}
server: {listen: "127.0.0.1:0", http: "127.0.0.1:0"}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(10_800),
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
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for wheel in filter(Path.is_file, (WHEEL, VISION_WHEEL)):
        name, version = wheel.name.split("-")[:2]
        release = version.partition("+")[0]
        constraints = re.sub(rf"^{name}==.*$", f"{name}=={release}", constraints, flags=re.MULTILINE)
        (folder / "index" / name).mkdir(parents=True)
        shutil.copy(wheel, folder / "index" / name)
        link = f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>'
        (folder / "index" / name / "index.html").write_text(link, encoding="utf-8")
    (copy / "constraints.txt").write_text(constraints, encoding="utf-8")
    return copy


Layers = Mapping[str, int]
"""The layers of an image, the base's first, by their files, and their unpacked bytes."""


def build(folder: Path, buildah: Buildah, base: str, target: str, tag: str) -> Layers:
    """Build an image, ``localhost/TARGET:TAG``."""
    name = f"{target}:{tag}"
    buildah(
        *("build", "--isolation", "chroot", "--layers", "--target", target, "--tag", f"localhost/{name}"),
        *("--file", folder / "source" / CONTAINERFILE.relative_to(ROOT)),
        *("--build-arg", f"PYTHON_IMAGE={base}"),
        *("--build-arg", f"{target.upper()}_TORCH_INDEX=file:///index"),
        *("--volume", f"{folder}/index:/index:ro", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro"),
        folder / "source",
    )
    buildah("push", "--disable-compression", f"localhost/{name}", f"dir:{folder}/{name}")
    manifest = json.loads((folder / name / "manifest.json").read_text(encoding="utf-8"))
    return {layer["digest"].removeprefix("sha256:"): layer["size"] for layer in manifest["layers"]}


@pytest.fixture(scope="module")
def first(folder: Path, buildah: Buildah, base: str, source: Path) -> Mapping[str, Layers]:
    assert source.is_dir()
    return {target: build(folder, buildah, base, target, "first") for target in TARGETS}


@pytest.fixture(scope="module")
def second(
    folder: Path, buildah: Buildah, base: str, source: Path, first: Mapping[str, Layers]
) -> Mapping[str, Layers]:
    """After a change of afl."""
    with (source / "common/afl/errors.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    return {target: build(folder, buildah, base, target, "second") for target in first}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_small_and_a_change_of_afl_ships_little(
    folder: Path, target: str, first: Mapping[str, Layers], second: Mapping[str, Layers]
) -> None:
    own = list(first[target].values())[1:]
    changed = [layer for layer in second[target] if layer not in first[target]]
    assert changed
    shipped = [len(gzip.compress((folder / f"{target}:second" / layer).read_bytes())) for layer in changed]
    figures = "%s: %.0f MB beside its base; a change of afl ships %.1f MB"
    LOG.info(figures, target, sum(own) / 1e6, sum(shipped) / 1e6)
    assert sum(own) <= IMAGE_BYTES[target], own
    assert sum(shipped) <= CHANGE_BYTES, shipped


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_what_it_is_and_has_what_it_runs(
    target: str, buildah: Buildah, second: Mapping[str, Layers]
) -> None:
    assert target in second
    about = json.loads(buildah("inspect", "--type", "image", f"localhost/{target}:second"))["OCIv1"]["config"]
    assert about["Labels"]["org.opencontainers.image.title"] == f"afl-{target}"
    container = buildah("from", f"localhost/{target}:second")
    inside = ("run", "--isolation", "chroot", container, "--")
    assert buildah(*inside, f"afl-{target}", "--help").startswith(f"usage: afl-{target}")
    assert f"afl-{target}" in buildah(*inside, f"afl-{target}", "--version")
    bill = json.loads(buildah(*inside, "cat", "/opt/afl/share/afl/sbom.cdx.json"))
    assert "torch" in {one["name"] for one in bill["components"]}
    module = {"server": "afl_server.runner.run", "worker": "afl_worker.runtime"}[target]
    imported = f"import {module}, importlib.util as u; print(u.find_spec('pip'))"
    assert buildah(*inside, "/opt/afl/bin/python", "-c", imported) == "None"
    buildah("rm", container)


class Container:
    """An image that crun runs as Kubernetes would: another user, a read-only root, no capability."""

    def __init__(self, folder: Path, buildah: Buildah, image: str, name: str) -> None:
        self._folder = folder / name
        self.state = self._folder / "state"
        self.state.mkdir(parents=True)
        os.chown(self.state, 10001, 10001)
        self._root = buildah("mount", buildah("from", "--name", name, image))
        about = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]
        self._about: dict[str, Any] = about
        self._name = name

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Run its entrypoint with these arguments; what it logs is on standard error."""
        bind = {"type": "none", "options": ["rbind", "rw", "nosuid", "nodev"]}
        own = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
        bundle = {
            "ociVersion": "1.0.2",
            "process": {
                "user": dict.fromkeys(("uid", "gid"), 10001),
                "args": [*self._about["Entrypoint"], *arguments],
                "env": self._about["Env"],
                "cwd": self._about["WorkingDir"],
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "root": {"path": self._root, "readonly": True},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {**own, "destination": "/dev", "options": ["nosuid", "mode=755"]},
                {**own, "destination": "/dev/shm"},
                {**own, "destination": "/tmp"},
                {**bind, "destination": self._about["WorkingDir"], "source": str(self.state)},
            ],
            # The network is this machine's.
            "linux": {"namespaces": [{"type": each} for each in ("pid", "mount", "ipc", "uts")]},
        }
        (self._folder / "config.json").write_text(json.dumps(bundle), encoding="utf-8")
        # crun takes no mixture of both versions of cgroups, and this needs none.
        only = 'umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec crun "$@"'
        options = ["--root", self._folder / "crun", "--cgroup-manager=disabled"]
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", only, "sh", *options, "run", "-b", self._folder, self._name],
            stderr=subprocess.PIPE,
            text=True,
        )


def logged(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """The first line of this event."""
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith("{") and (entry := json.loads(line)).get("event") == event:
            found: dict[str, Any] = entry
            return found
    raise AssertionError("".join(told)[-3000:])


@pytest.mark.skipif(len(TARGETS) < 2, reason="AFL_TORCHVISION_WHEEL names no wheel of torchvision")
@pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed")
def test_a_server_and_two_workers_in_their_images_come_to_the_end(
    folder: Path, buildah: Buildah, second: Mapping[str, Layers]
) -> None:
    assert second
    server = Container(folder, buildah, "localhost/server:second", "server")
    (server.state / "server.yaml").write_text(CONFIG, encoding="utf-8")
    with contextlib.ExitStack() as stack:

        def start(container: Container, *arguments: str) -> subprocess.Popen[str]:
            process = stack.enter_context(container.start(*arguments))
            stack.callback(process.kill)
            return process

        served = start(server, "--config", "server.yaml")
        address = f"127.0.0.1:{logged(served, 'listening')['port']}"
        workers = [
            start(
                Container(folder, buildah, "localhost/worker:second", f"worker-{each}"),
                *("--http=127.0.0.1:0", "--server", address, "--id", str(each)),
            )
            for each in range(2)
        ]
        for process in (*workers, served):
            assert process.communicate(timeout=300) is not None
            assert process.returncode == 0
    summary = json.loads((server.state / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["rounds"] == 60
