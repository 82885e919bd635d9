"""The container files: linted, pinned, and what they copy and start is there."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.metadata import distribution, requires, version
from pathlib import Path

import pytest
from deployment_manifests import ROOT
from deployment_pods import CONTAINERFILE
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
    layers = [f"--from={stage}-packages /opt/afl /opt/afl", f"--from={stage}-layer /layer/opt/afl /opt/afl"]
    assert copies == layers, "what changes least comes first"
    assert {f"{stage}-packages", f"{stage}-layer"} <= stages().keys()


@pytest.mark.parametrize("stage", ["server", "worker"])
def test_what_is_installed_beside_afl_knows_nothing_of_its_source(stage: str) -> None:
    """So that the layer of dependencies stays as it was when afl changes."""
    copied = {
        source for word, rest in stages()[f"{stage}-packages"] if word == "COPY" for source in rest.split()
    }
    assert copied.isdisjoint({"common", "cli", "server", "worker", "lab", "pyproject.toml"})
    assert f"deploy/containers/requirements-{stage}.txt" in copied


def pinned(stage: str) -> dict[str, str]:
    """The versions in a stage's file, by name."""
    text = (CONTAINERFILE.parent / f"requirements-{stage}.txt").read_text(encoding="utf-8")
    found = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.M)
    assert len(found) == len(re.findall(r"^[^ #\n]", text, re.M)), "each has hashes"
    return {name: version for name, version, _ in found}


@pytest.mark.parametrize("stage", ["server", "worker"])
def test_the_pins_with_hashes_are_what_afl_and_pytorch_ask_for(stage: str) -> None:
    """As `make pins` makes them; what PyTorch's builds with CUDA need besides comes from its own index."""
    pins = pinned(stage)
    constraints = dict(
        re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    )
    assert all(pins[name] == version for name, version in constraints.items() if name in pins)
    needed = [
        *PROJECT["dependencies"],
        *(PROJECT["optional-dependencies"]["tasks"] if stage == "worker" else []),
    ]
    asked = {canonicalize_name(one.name): one for one in map(Requirement, needed)}
    own = {name: asked.pop(name) for name in ("torch", "torchvision") if name in asked}
    elsewhere = {"platform_system": "Darwin", "sys_platform": "darwin", "extra": ""}
    for name in own:
        for one in map(Requirement, requires(name) or []):
            if one.marker is None or one.marker.evaluate(elsewhere):
                asked.setdefault(canonicalize_name(one.name), one)
    for name in asked.keys() - own.keys():
        assert asked[name].specifier.contains(pins[name]), name


def test_the_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    afl = tmp_path / "lib/python3/site-packages/afl-0.1.0.dist-info"
    afl.mkdir(parents=True)
    (afl / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: afl\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\n"
    )
    packages = tmp_path / "packages/lib/python3"
    packages.mkdir(parents=True)
    (packages / "site-packages").symlink_to(Path(distribution("numpy").locate_file("")))
    program = CONTAINERFILE.parent / "sbom.py"
    subprocess.run([sys.executable, program, tmp_path / "packages", tmp_path], check=True)
    bill = json.loads((tmp_path / "share/afl/sbom.cdx.json").read_text(encoding="utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    about = bill["metadata"]["component"]
    assert (about["purl"], about["licenses"]) == ("pkg:pypi/afl@0.1.0", [{"expression": "Apache-2.0"}])
    components = {one["name"]: one for one in bill["components"]}
    assert components["numpy"]["version"] == version("numpy")
    assert components["grpcio-health-checking"]["purl"].startswith("pkg:pypi/grpcio-health-checking@")
    references = [one["bom-ref"] for one in bill["components"]]
    assert len(set(references)) == len(references)


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
    versions = {
        line.partition("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    }
    seen = set()
    for word, rest in instructions():
        for command in rest.split("&&") if word == "RUN" else ():
            words = shlex.split(command)
            if words[:2] != ["pip", "install"]:
                continue
            match words[2:]:
                case ["--no-compile", "--require-hashes", "--requirement", file]:
                    assert (CONTAINERFILE.parent / file).exists()
                case ["--no-deps", "--root", "/layer", "."]:
                    seen.add(".")
                case ["--no-compile", "--index-url", _, "--constraint", "constraints.txt", *names]:
                    assert set(names) <= versions
                    seen |= set(names)
                case _:
                    raise AssertionError(command)
    assert seen == {"torch", "torchvision", "."}


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
    assert f"org.opencontainers.image.version={__version__} " in CONTAINERFILE.read_text(encoding="utf-8")
