"""Becomes one container of a pod: its command, on a read-only root, as its user, in a network of its own.

python pod_main.py SPEC.json, as root. It stays the same process throughout, so that whoever started it has
the container's own number. What a container runtime does and this does not: seccomp, limits of resources.
"""

from __future__ import annotations

import ctypes
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    """See above."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    _join_network(spec["network"], spec["link"], spec["address"])
    _enter_root(Path(spec["scratch"]), spec["mounts"], [Path(path) for path in spec["program"]])
    os.chdir(spec["directory"])
    os.setgroups(spec["groups"])
    os.setgid(spec["group"])
    os.setuid(spec["user"])
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    os.execvpe(spec["command"][0], spec["command"], spec["environment"])


def _join_network(holder: int, link: str, address: str) -> None:
    """One end of a cable in the bridge of the cluster's network, the other here."""
    there = ["nsenter", f"--net=/proc/{holder}/ns/net"]
    _run(
        *there,
        "ip",
        "link",
        "add",
        "name",
        link,
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        str(os.getpid()),
    )
    _run(*there, "ip", "link", "set", link, "master", "cluster", "up")
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", address, "dev", "eth0")
    _run("ip", "link", "set", "eth0", "up")


def _enter_root(scratch: Path, mounts: list[dict[str, Any]], program: list[Path]) -> None:
    """This machine's files under a layer that takes the mount points and is then made read-only."""
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "none", str(scratch))
    root, upper, work = (scratch / name for name in ("root", "upper", "work"))
    for folder in (root, upper, work):
        folder.mkdir()
    # Sources lie in folders that the layer or a volume hides from here on.
    sources = []
    for number, mount in enumerate(mounts):
        source, path = scratch / f"source-{number}", root / mount["path"].lstrip("/")
        _bind(Path(mount["source"]), source)
        sources.append((source, path, mount["read_only"]))
    hidden = []
    for number, path in enumerate(program):
        source = scratch / f"program-{number}"
        _bind(path, source)
        hidden.append((source, root / str(path).lstrip("/"), True))
    layers = f"lowerdir=/,upperdir={upper},workdir={work}"
    _run("mount", "-t", "overlay", "overlay", "-o", layers, str(root))
    for path in program:
        for folder in path.parents:
            here = root / str(folder).lstrip("/")
            here.chmod(stat.S_IMODE(here.stat().st_mode) | 0o055)
    for path in (root / mount["path"].lstrip("/") for mount in mounts):
        if not path.exists():
            path.mkdir(parents=True)
    for name in ("proc", "dev"):
        _run("mount", "--rbind", f"/{name}", str(root / name))
    for source, path, is_read_only in [*sources, *hidden]:
        if not path.exists():  # inside a volume that was just mounted over it
            path.mkdir(parents=True)
        _run("mount", "--bind", str(source), str(path))
        if is_read_only:
            _run("mount", "-o", "remount,bind,ro", str(path))
    _run("mount", "-o", "remount,ro", str(root))
    os.chroot(root)


def _bind(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    _run("mount", "--bind", str(source), str(target))


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
