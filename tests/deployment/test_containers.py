"""The container files: linted, pinned, and what they copy and start is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest
from deployment_manifests import ROOT
from deployment_pods import CONTAINERFILE

import afl_server.main
import afl_worker.main
from afl import __version__
from afl.config import load_config

PARSERS: dict[str, Callable[[], ArgumentParser]] = {
    "afl-server": afl_server.main.make_server_parser,
    "afl-worker": afl_worker.main.make_worker_parser,
}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    text = CONTAINERFILE.read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines.splitlines() if line)
    ]


def stages() -> dict[str, list[Instruction]]:
    """Instructions by stage, with those of the stages that it is from."""
    found: dict[str, list[Instruction]] = {}
    name = ""
    for word, rest in instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = [*found.get(base, [])]
        elif name:
            found[name].append((word, rest))
    return found


def last(stage: str, word: str) -> str:
    return [rest for each, rest in stages()[stage] if each == word][-1]


def exec_form(text: str) -> list[str]:
    words: list[str] = json.loads(text)
    return words


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_linter_finds_nothing() -> None:
    done = subprocess.run(["hadolint", str(CONTAINERFILE)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_base_is_pinned_by_version_and_digest() -> None:
    bases = [rest.partition(" AS ")[0] for word, rest in instructions() if word == "FROM"]
    assert set(bases) - stages().keys() == {"${PYTHON_IMAGE}"}
    (image,) = re.findall(
        r"^PYTHON_IMAGE=(.*)$", "\n".join(rest for word, rest in instructions() if word == "ARG"), re.M
    )
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", image)
    needed = tuple(map(int, PROJECT["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, image.partition(":")[2].split(".")[:2])) >= needed


@pytest.mark.parametrize("stage", ["server", "worker"])
def test_an_image_runs_as_nobody_in_particular(stage: str) -> None:
    assert last(stage, "USER") == "10001:10001"
    directory = last(stage, "WORKDIR")
    assert f"--owner 10001 --group 10001 {directory}" in last(stage, "RUN")
    environment = dict(
        word.split("=", 1) for _, rest in stages()[stage] if _ == "ENV" for word in rest.split()
    )
    assert environment["HOME"] == "/tmp"
    written = {path for path in environment.values() if path.startswith("/") and ":" not in path}
    assert all(path.startswith("/tmp") for path in written), "nothing but /tmp and the volume is written to"


@pytest.mark.parametrize("stage", ["server", "worker"])
def test_what_an_image_has_is_what_was_installed_and_no_source(stage: str) -> None:
    copies = [rest for word, rest in stages()[stage] if word in {"COPY", "ADD"}]
    assert copies == [f"--from={stage}-packages /opt/afl /opt/afl"]
    assert f"{stage}-packages" in stages()


def test_everything_that_is_copied_is_there_and_let_in() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "nothing comes in but what is named"
    let_in = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = {
        source
        for word, rest in instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert copied == let_in
    for name in copied:
        assert (ROOT / name).exists(), name
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    for package in build["targets"]["wheel"]["packages"]:
        assert Path(package).parts[0] in copied
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= copied


def test_what_is_installed_is_pinned_and_exists() -> None:
    pinned = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    seen = set()
    for word, rest in instructions():
        if word != "RUN" or not rest.startswith("pip install"):
            continue
        words = shlex.split(rest)[2:]
        assert words[words.index("--constraint") + 1] == "constraints.txt"
        for option in ("--constraint", "--index-url"):
            if option in words:
                at = words.index(option)
                del words[at : at + 2]
        for requirement in words:
            extras = re.fullmatch(r"\.(?:\[(\w+)\])?", requirement)
            if extras is None:
                assert requirement in pinned
            elif extras[1]:
                assert extras[1] in PROJECT["optional-dependencies"]
            seen.add(requirement)
    assert seen == {"torch", "torchvision", ".", ".[tasks]"}


@pytest.mark.parametrize(("stage", "program"), [("server", "afl-server"), ("worker", "afl-worker")])
def test_an_image_starts_a_command_of_ours(stage: str, program: str) -> None:
    words = exec_form(last(stage, "ENTRYPOINT"))
    assert words[0] == program
    assert program in PROJECT["scripts"]
    added = exec_form(last(stage, "CMD")) if stage == "server" else ["--id=0", "--server=a:1", "--http=:9091"]
    parsed = PARSERS[program]().parse_args([*words[1:], *added])
    if stage == "worker":
        assert parsed.http == ":9091", "what is given later counts"


@pytest.mark.parametrize("stage", ["server", "worker"])
def test_the_health_check_asks_where_the_daemon_answers(stage: str) -> None:
    words = exec_form(last(stage, "HEALTHCHECK").partition(" CMD ")[2])
    assert words[:2] == ["python", "-c"]
    ast.parse(words[2])
    (asked,) = re.findall(r"http://(\S+)/healthz'", words[2])
    if stage == "server":
        assert asked == str(load_config(ROOT / "deploy" / "server.yaml", []).server.http)
    else:
        assert f"--http={asked}" in exec_form(last(stage, "ENTRYPOINT"))


def test_the_version_is_this_one() -> None:
    named = set(
        re.findall(
            r"afl-(?:server|worker)(?:-cpu)?:(\d+\.\d+\.\d+)", CONTAINERFILE.read_text(encoding="utf-8")
        )
    )
    for values in (ROOT / "deploy" / "helm").rglob("*.yaml"):
        text = values.read_text(encoding="utf-8")
        named |= set(re.findall(r"afl-(?:server|worker)(?:-cpu)?:(\d+\.\d+\.\d+)", text))
        named |= set(re.findall(r"^(?:appV|v)ersion: (\S+)$", text, re.MULTILINE))
    assert named == {__version__}
