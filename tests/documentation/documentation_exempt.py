"""What pages tell a reader to do that no test can do here, and what is checked of it instead."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from documentation_reader import NotRun, PageError, parse

from afl.config.schema import Server
from support.pages import ROOT, blocks, commands, pages

CONTAINERFILE = ROOT / "deploy" / "containers" / "Containerfile"
UNITS = ROOT / "deploy" / "systemd"
CLUSTER = ROOT / "deploy" / "kubernetes" / "overlays" / "cluster"

SERVER = Server()
PORTS = {str(SERVER.listen.port), str(SERVER.http.port)} if SERVER.http is not None else set()


def must(condition: object, message: str) -> None:
    """Raise for what a page says wrongly."""
    if not condition:
        raise PageError(message)


def pip(words: Sequence[str]) -> None:
    """The extras of afl that are named are there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        found = re.fullmatch(r"(?:\.|afl)\[([\w,]+)\]", word)
        unknown = set(found[1].split(",")) - project["optional-dependencies"].keys() if found else set()
        must(not unknown, f"pyproject.toml has no extra {', '.join(sorted(unknown))}")
    # PyTorch may come first, from where its build for machines without a GPU is.
    wanted = r"torch$" if "--index-url" in words else r"(?:\.|afl)(?:\[|$)"
    must(any(re.match(wanted, word) for word in words), f"afl is not in: {shlex.join(words)}")


def prefix(words: Sequence[str]) -> None:
    """The environment is where the units look for it."""
    must(f"ExecStart={words[-1]}/bin/" in units(), f"no unit starts anything of {words[-1]}")


def user(words: Sequence[str]) -> None:
    """The user and its home are those of the units."""
    must(f"User={words[-1]}\n" in units(), f"no unit runs as {words[-1]}")
    home = words[words.index("--home-dir") + 1]
    must(f"WorkingDirectory={home}\n" in units(), f"no unit works in {home}")


def settings_folder(words: Sequence[str]) -> None:
    """The units read what lies there."""
    must(f"{words[-1]}/" in units(), f"no unit reads {words[-1]}")


def copied(words: Sequence[str]) -> None:
    """What is copied is there."""
    must((ROOT / words[1]).is_file(), f"there is no {words[1]}")


def unit(words: Sequence[str]) -> None:
    """The unit is one of ours."""
    name = words[-1].partition("@")[0] + ("@" if "@" in words[-1] else "")
    must((UNITS / f"{name}.service").is_file(), f"there is no unit {words[-1]}")


@cache
def units() -> str:
    """All units, one behind the other."""
    return "".join(path.read_text(encoding="utf-8") for path in sorted(UNITS.iterdir()))


def tunnel(words: Sequence[str]) -> None:
    """It leads from a port to the same one, which the server listens on unless told otherwise."""
    port, host, there = words[words.index("-L") + 1].split(":")
    must(
        port == there and there in PORTS and host == "127.0.0.1",
        f"not a port of the server: {shlex.join(words)}",
    )


def image(words: Sequence[str]) -> None:
    """File, target and arguments of the build are there."""
    text = CONTAINERFILE.read_text(encoding="utf-8")
    must((ROOT / words[words.index("-f") + 1]).is_file(), f"there is no {words[words.index('-f') + 1]}")
    target = words[words.index("--target") + 1]
    must(f" AS {target}\n" in text, f"{CONTAINERFILE.name} has no target {target}")
    for option, value in itertools.pairwise(words):
        name = value.partition("=")[0]
        must(
            option != "--build-arg" or f"ARG {name}=" in text, f"{CONTAINERFILE.name} has no argument {name}"
        )


def container(words: Sequence[str]) -> None:
    """The image is one that the page builds, and what follows it are its program's options."""
    (place,) = [index for index, word in enumerate(words) if re.search(r"/afl-(server|worker):", word)]
    must(words[place] in images(), f"{words[place]} is built nowhere")
    program = re.split("[/:]", words[place])[-2]
    arguments = words[place + 1 :] or ["--config", "/etc/afl/config/server.yaml"]
    parse([program, *arguments])
    mounted = [word.split(":")[1] for word in words[:place] if re.search(r"\w:/", word)]
    for each in arguments:
        must(
            not each.startswith("/") or any(each.startswith(folder) for folder in mounted),
            f"{each} is not in what is mounted: {', '.join(mounted)}",
        )


def loaded(words: Sequence[str]) -> None:
    """The images are built by the page, and used by the overlay for laptops."""
    for word in words[3:]:
        must(word in images(), f"{word} is built nowhere")


def images() -> set[str]:
    """The images that the page on containers builds."""
    found = [shlex.split(line) for line in commands("docs/kubernetes.md") if line.startswith("docker build")]
    return {words[words.index("-t") + 1] for words in found}


@cache
def built(overlay: Path) -> list[dict[str, Any]]:
    """The documents of an overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], check=False, capture_output=True, text=True)
    must(done.returncode == 0, done.stderr)
    return list(yaml.safe_load_all(done.stdout))


def applied(words: Sequence[str]) -> None:
    """The overlay builds."""
    must(built(ROOT / words[words.index("-k") + 1]), f"nothing is in {words[-1]}")


def in_cluster(words: Sequence[str]) -> None:
    """What is named is there once an overlay is applied."""
    documents = built(CLUSTER)
    names = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in documents}
    for word in words:
        must("/" not in word or ":" in word or word in names, f"the cluster has no {word}")
        pod = re.match(r"(afl-server)-0:(\S+)", word)
        if pod is not None:
            must(f"statefulset/{pod[1]}" in names, f"the cluster has no pod {word}")
            settings = yaml.safe_load((CLUSTER / "settings.yaml").read_text(encoding="utf-8"))["data"]
            must(
                pod[2] == f"/var/lib/afl/{settings['run']}",
                f"the run is not in {pod[2]}, but {settings['run']}",
            )


def label(words: Sequence[str]) -> None:
    """The label is one of Pod Security."""
    must(
        re.fullmatch(r"pod-security\.kubernetes\.io/enforce=(privileged|baseline|restricted)", words[-1]),
        f"no label of Pod Security: {words[-1]}",
    )


def options_alone(words: Sequence[str]) -> None:
    """The reader has held its options against the program's own."""


def in_passing(line: str) -> None:
    """Check a command that stands in a page's text, and is perhaps only the beginning of one.

    Raises:
        PageError: if a subcommand, an option, a target, an extra, a module or a file of it is not there.
    """
    program, *words = shlex.split(line)
    if program == "make":
        targets = set(
            re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        )
        must(set(words[:1]) <= targets, f"the Makefile has no target {words[:1]}")
    elif program == "pip":
        pip(words)
    elif program == "python":
        name = words[1:2] if words[:1] == ["-m"] else words[:1]
        must(all(_is_known(each) for each in name), f"no such module, and no page shows it: {name}")
        if words[2:]:
            parse([program, *words])
    elif len(words) == 1 and not words[0].startswith("-"):
        parse([program, *words, "--help"])
    elif words:
        parse([program, *words])


def _is_known(name: str) -> bool:
    """Whether it is a module of ours, or a script that a page or ``afl new`` writes."""
    if not name.endswith(".py"):
        return importlib.util.find_spec(name) is not None
    return name == "test_task.py" or any(
        block.text.startswith(f"# {name}\n") for page in pages() for block in blocks(page, "python")
    )


def flower(words: Sequence[str]) -> None:
    """What a node is given is a file that the page makes."""
    for path in re.findall(r'data-path="(.+)"', words[-1]):
        made = [block.text for block in blocks("docs/from-flower.md", "python")]
        name = re.sub(r"\d", "{site}", path)
        must(any(f'"{name}"' in text for text in made), f"the page makes no {path}")


NOT_RUN = (
    *(
        NotRun(program, "Flower is not among what is installed for tests", flower, page="docs/from-flower.md")
        for program in ("flower-superlink", "flower-supernode", "flwr run")
    ),
    NotRun("pip install", "nothing is installed by tests", pip),
    NotRun("python3 -m venv /opt/afl", "it would write outside the test's folder", prefix),
    NotRun("/opt/afl/bin/pip install", "nothing is installed by tests", pip),
    NotRun("useradd", "it would change the machine's users", user),
    NotRun("mkdir -p /etc/afl", "it would write outside the test's folder", settings_folder),
    NotRun("cp deploy/systemd", "it would write outside the test's folder", copied),
    NotRun("systemctl", "it would change the machine's services", unit),
    NotRun("journalctl", "the service does not run", unit),
    NotRun("ssh", "there is no other machine", tunnel),
    NotRun("docker build", "there are no base images here", image),
    NotRun("docker run", "there are no images here", container),
    NotRun("kind load docker-image", "there is no cluster", loaded),
    NotRun("kubectl apply", "there is no cluster", applied),
    NotRun("kubectl label namespace", "there is no cluster", label),
    NotRun("kubectl get pods", "there is no cluster", in_cluster),
    NotRun("kubectl logs", "there is no cluster", in_cluster),
    NotRun("kubectl port-forward", "there is no cluster", in_cluster),
    NotRun("kubectl cp", "there is no cluster", in_cluster),
    NotRun("afl status", "the server would be in a cluster", options_alone, page="docs/kubernetes.md"),
)
