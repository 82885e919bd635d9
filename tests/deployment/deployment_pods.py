"""The pods of rendered manifests as real processes: exact commands, mounted configuration, read-only roots.

Each pod has a network namespace with an address on a bridge, and services are names of pods' addresses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
from deployment_manifests import ROOT, Document, command, environment, of_kind, ordinals

from support.process import Process

CONTAINERFILE = ROOT / "deploy" / "containers" / "Containerfile"

_PROBE = (
    "import sys, urllib.request, urllib.error\n"
    "try: answer = urllib.request.urlopen(sys.argv[1], timeout=10)\n"
    "except urllib.error.HTTPError as error: answer = error\n"
    "print(answer.status, answer.read().decode())"
)

_NETWORK = (
    "ip link add name cluster type bridge && ip link set lo up && ip address add 10.44.0.1/24 dev cluster && "
    "ip link set cluster up && echo up && exec sleep infinity"
)


@cache
def obstacle() -> str:
    """Why pods cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces and mounts"
    missing = [program for program in ("ip", "nsenter", "mount", "unshare") if shutil.which(program) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    script = (
        "ip link add name cluster type bridge && ip link add name end type veth peer name other && "
        "mount -t tmpfs none /mnt && "
        "mkdir /mnt/u /mnt/w /mnt/r && "
        "mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"
    )
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", script], check=False, capture_output=True, text=True
    )
    return f"this machine does not allow it: {tried.stderr.strip()}" if tried.returncode else ""


class Cluster:
    """A network for pods, and the volumes that outlive them; a context manager that leaves no process behind.

    Args:
        documents: what would be applied.
        folder: an empty folder of its own.
        secrets: the files of each Secret, by its name.
    """

    def __init__(
        self, documents: list[Document], folder: Path, secrets: dict[str, dict[str, bytes]] | None = None
    ) -> None:
        if obstacle():
            pytest.skip(obstacle())
        self._documents = documents
        self._folder = folder
        self._secrets = secrets or {}
        self._sets = {each["metadata"]["name"]: each for each in of_kind(documents, "StatefulSet")}
        self._addresses: dict[tuple[str, int], str] = {}
        self._pods: list[Process] = []
        self._starts = 0
        folder.mkdir(parents=True, exist_ok=True)
        for name, each in self._sets.items():
            for ordinal in ordinals(each):
                self._addresses[name, ordinal] = f"10.44.0.{10 + len(self._addresses)}"

    def __enter__(self) -> Self:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _NETWORK],
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self._pods:
            pod.close()
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    @property
    def replicas(self) -> dict[str, int]:
        """How many pods each StatefulSet has."""
        return {name: each["spec"]["replicas"] for name, each in self._sets.items()}

    def grace(self, name: str) -> float:
        """Seconds between SIGTERM and SIGKILL."""
        seconds: float = self._sets[name]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return seconds

    def start(self, name: str, ordinal: int = 0) -> Process:
        """Start a pod of a StatefulSet; again, once it has ended."""
        pod = self._sets[name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        security = pod["securityContext"]
        self._starts += 1
        scratch = self._folder / f"pod-{self._starts}"
        scratch.mkdir()
        mounts = self._mounts(name, ordinal, pod, container, scratch)
        spec = {
            "network": self._holder.pid,
            "link": f"pod{self._starts}",
            "address": f"{self._addresses[name, ordinal]}/24",
            "scratch": str(_made(scratch / "root")),
            "mounts": mounts,
            "program": [str(path) for path in _programs()],
            "directory": image_directory(),
            "user": security["runAsUser"],
            "group": security["runAsGroup"],
            "groups": [security["fsGroup"]],
            "command": command(container, ordinal),
            "environment": {**_image_environment(), **environment(container, ordinal)},
        }
        path = scratch / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        process = Process(
            f"{name}-{ordinal}",
            [str(Path(__file__).with_name("pod_main.py")), str(path)],
            folder=self._folder,
        )
        self._pods.append(process)
        return process

    def claim(self, template: str, name: str, ordinal: int = 0) -> Path:
        """The folder of a PersistentVolumeClaim made from a template of a StatefulSet."""
        return self._folder / "volumes" / f"{template}-{name}-{ordinal}"

    def probe(self, name: str, ordinal: int, kind: str) -> tuple[int, str]:
        """Status and body of one of a pod's probes, asked as the kubelet does."""
        (container,) = self._sets[name]["spec"]["template"]["spec"]["containers"]
        asked = container[kind]["httpGet"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == asked["port"]]
        return self.get(name, ordinal, port, asked["path"])

    def get(self, name: str, ordinal: int, port: int, path: str) -> tuple[int, str]:
        """Status and body of a page of a pod."""
        url = f"http://{self._addresses[name, ordinal]}:{port}{path}"
        there = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]
        plain = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        done = subprocess.run(
            [*there, sys.executable, "-S", "-c", _PROBE, url],
            check=False,
            capture_output=True,
            text=True,
            env=plain,
        )
        assert done.returncode == 0, done.stderr
        status, _, body = done.stdout.partition(" ")
        return int(status), body.strip()

    def report(self) -> str:
        """The end of what each pod logged."""
        return "\n".join(f"--- {pod.name}\n{pod.text[-3000:]}" for pod in self._pods)

    def _mounts(
        self, name: str, ordinal: int, pod: Document, container: Document, scratch: Path
    ) -> list[dict[str, Any]]:
        group = pod["securityContext"]["fsGroup"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        templates = {
            each["metadata"]["name"] for each in self._sets[name]["spec"].get("volumeClaimTemplates", [])
        }
        hosts = scratch / "hosts"
        hosts.write_text(self._hosts(), encoding="utf-8")
        mounts = [{"source": str(hosts), "path": "/etc/hosts", "read_only": True}]
        for mount in container["volumeMounts"]:
            if mount["name"] in templates:
                source = _writable(self.claim(mount["name"], name, ordinal), group)
            else:
                source = self._volume(volumes[mount["name"]], scratch / mount["name"], group)
            read_only = mount.get("readOnly", False)
            mounts.append({"source": str(source), "path": mount["mountPath"], "read_only": read_only})
        # A parent before what is inside it, as Kubernetes mounts.
        return sorted(mounts, key=lambda mount: str(mount["path"]))

    def _volume(self, volume: Document, source: Path, group: int) -> Path:
        if "emptyDir" in volume:
            return _writable(source, group)
        _made(source)
        if "configMap" in volume:
            (found,) = [
                each
                for each in of_kind(self._documents, "ConfigMap")
                if each["metadata"]["name"] == volume["configMap"]["name"]
            ]
            files = {file: text.encode() for file, text in found["data"].items()}
            mode = 0o644
        else:
            secret = volume["secret"]
            files, mode = self._secrets[secret["secretName"]], secret["defaultMode"]
            if "items" in secret:
                files = {item["path"]: files[item["key"]] for item in secret["items"]}
        for file, content in files.items():
            (source / file).write_bytes(content)
            os.chown(source / file, 0, group)
            (source / file).chmod(mode)
        return source

    def _hosts(self) -> str:
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for service in of_kind(self._documents, "Service"):
            for name, each in self._sets.items():
                labels = each["spec"]["template"]["metadata"]["labels"]
                if service["spec"]["selector"].items() <= labels.items():
                    lines.append(f"{self._addresses[name, ordinals(each)[0]]} {service['metadata']['name']}")
        return "\n".join(lines) + "\n"


def image_directory() -> str:
    """The working directory that the images have."""
    (directory,) = set(
        re.findall(r"^WORKDIR (/var\S+)$", CONTAINERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    return str(directory)


def _image_environment() -> dict[str, str]:
    """Of the images' stage `runtime`, with this installation's programs in the place of the image's."""
    stage = CONTAINERFILE.read_text(encoding="utf-8").partition(" AS runtime\n")[2].partition("\nFROM ")[0]
    (line,) = re.findall(r"^ENV (.+)$", stage, re.MULTILINE)
    values = dict(word.split("=", 1) for word in line.split())
    values["PATH"] = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return {**values, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def _programs() -> list[Path]:
    """Where this installation is: a mount may hide it, and its folders may be closed to others."""
    return sorted({place.resolve() for place in (ROOT, Path(sys.prefix), Path(sys.base_prefix))})


def _writable(folder: Path, group: int) -> Path:
    """As fsGroup makes a volume."""
    _made(folder)
    os.chown(folder, 0, group)
    folder.chmod(0o2775)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
