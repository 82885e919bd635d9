"""docs/kubernetes.md says what there is; its commands are followed in tests/documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import yaml
from deployment_manifests import FOLDER, OVERLAYS, ROOT

from support.pages import commands

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def given(program: str) -> list[list[str]]:
    """The arguments of each command line of a program."""
    return [words[1:] for words in map(shlex.split, commands("docs/kubernetes.md")) if words[0] == program]


def test_the_images_that_are_built_are_those_of_the_settings() -> None:
    built = {words[words.index("-t") + 1] for words in given("docker") if words[0] == "build"}
    used = set()
    for overlay in OVERLAYS:
        settings = yaml.safe_load(
            (FOLDER / "overlays" / overlay / "settings.yaml").read_text(encoding="utf-8")
        )
        used |= {value for key, value in settings["data"].items() if key.endswith("-image")}
    assert built == used


def test_the_secrets_are_made_of_the_files_that_the_manifests_read() -> None:
    (server,) = [
        words
        for words in given("kubectl")
        if words[:3] == ["create", "secret", "generic"] and "afl-server" in words
    ]
    files = {Path(word.partition("=")[2]).name for word in server if word.startswith("--from-file=")}
    assert files == {"server.pem", "server.key", "ca.pem"}
    assert [words for words in given("kubectl") if "afl-workers" in words]


def test_overlays_folders_and_claims_are_there() -> None:
    named = set(re.findall(r"deploy/kubernetes/overlays/([a-z-]+)", PAGE))
    assert named == set(OVERLAYS)
    for component in re.findall(r"components? `([a-z-]+)`", PAGE):
        assert (FOLDER / "components" / component).is_dir()
    workers = (FOLDER / "base" / "workers" / "stateful-set.yaml").read_text(encoding="utf-8")
    templates = {each["metadata"]["name"] for each in yaml.safe_load(workers)["spec"]["volumeClaimTemplates"]}
    assert set(re.findall(r"`(\w+)-afl-worker-N`", PAGE)) == templates
