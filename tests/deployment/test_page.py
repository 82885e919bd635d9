"""docs/kubernetes.md says what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from deployment_manifests import FOLDER, OVERLAYS, ROOT
from deployment_pods import CONTAINERFILE

import afl_server.main
import afl_worker.main
from afl.cli.main import make_afl_parser

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def commands(program: str) -> list[list[str]]:
    """The arguments of each command line of a program."""
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    return [words[1:] for words in map(shlex.split, lines) if words[0] == program]


def test_the_images_that_are_built_are_those_of_the_settings() -> None:
    built = {words[words.index("-t") + 1] for words in commands("docker") if words[0] == "build"}
    used = set()
    for overlay in OVERLAYS:
        settings = yaml.safe_load(
            (FOLDER / "overlays" / overlay / "settings.yaml").read_text(encoding="utf-8")
        )
        used |= {value for key, value in settings["data"].items() if key.endswith("-image")}
    assert built == used
    text = CONTAINERFILE.read_text(encoding="utf-8")
    for words in commands("docker"):
        if words[0] != "build":
            continue
        assert (ROOT / words[words.index("-f") + 1]).is_file()
        assert f" AS {words[words.index('--target') + 1]}\n" in text
        for word in words:
            if word.startswith("WORKER_TORCH_INDEX="):
                assert f"ARG {word.partition('=')[0]}=" in text


def test_containers_are_run_with_arguments_that_there_are() -> None:
    (worker,) = [words for words in commands("docker") if words[0] == "run" and "--id" in words]
    arguments = worker[worker.index("--id") :]
    parsed = afl_worker.main.make_worker_parser().parse_args(arguments)
    assert parsed.id == "3"
    mounted = {
        word.split(":")[1]
        for words in commands("docker")
        if words[0] == "run"
        for word in words
        if ":/" in word
    }
    assert str(parsed.ca.parent) in mounted
    assert parsed.data_dir in mounted
    (server,) = [words for words in commands("docker") if words[0] == "run" and "--id" not in words]
    assert "/etc/afl/config/server.yaml" in mounted
    assert server[-1].startswith("ghcr.io/OWNER/afl-server")
    assert afl_server.main.make_server_parser().parse_args(["--config", "/etc/afl/config/server.yaml"])


def test_commands_of_ours_parse() -> None:
    for words in commands("afl"):
        make_afl_parser().parse_args(words)
    assert len(commands("afl")) == 2


def test_the_secrets_are_made_of_the_files_that_the_manifests_read() -> None:
    (server,) = [
        words
        for words in commands("kubectl")
        if words[:3] == ["create", "secret", "generic"] and "afl-server" in words
    ]
    files = {Path(word.partition("=")[2]).name for word in server if word.startswith("--from-file=")}
    assert files == {"server.pem", "server.key", "ca.pem"}
    assert [words for words in commands("kubectl") if "afl-workers" in words]


def test_overlays_folders_and_claims_are_there() -> None:
    named = set(re.findall(r"deploy/kubernetes/overlays/([a-z-]+)", PAGE))
    assert named == set(OVERLAYS)
    for component in re.findall(r"components? `([a-z-]+)`", PAGE):
        assert (FOLDER / "components" / component).is_dir()
    workers = (FOLDER / "base" / "workers" / "stateful-set.yaml").read_text(encoding="utf-8")
    templates = {each["metadata"]["name"] for each in yaml.safe_load(workers)["spec"]["volumeClaimTemplates"]}
    assert set(re.findall(r"`(\w+)-afl-worker-N`", PAGE)) == templates


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
def test_a_manifest_that_is_shown_fits_the_schema(block: str) -> None:
    kubernetes_validate.validate(yaml.safe_load(block), kubernetes_validate.latest_version(), strict=True)
