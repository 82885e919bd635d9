"""docs/kubernetes.md says what there is; its commands are followed in tests/documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from deployment_manifests import EXAMPLES, FOLDER, ROOT, example_values, of_kind, rendered, the

from support.pages import commands

PAGE = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def given(program: str) -> list[list[str]]:
    """The arguments of each command line of a program."""
    return [words[1:] for words in map(shlex.split, commands("docs/kubernetes.md")) if words[0] == program]


def test_the_images_that_are_built_are_those_of_the_values() -> None:
    built = {words[words.index("-t") + 1] for words in given("docker") if words[0] == "build"}
    used = {
        part["image"]
        for name in ("default", *EXAMPLES)
        for part in (example_values(name).get("server", {}), example_values(name).get("site", {}))
        if "image" in part
    }
    assert built == used


def test_the_secrets_are_made_of_the_files_that_the_pods_read() -> None:
    made = [words for words in given("kubectl") if words[:3] == ["create", "secret", "generic"]]
    (server,) = [words for words in made if "afl-server" in words]
    files = {Path(word.partition("=")[2]).name for word in server if word.startswith("--from-file=")}
    assert files == {"server.pem", "server.key", "ca.pem"}
    assert len([words for words in made if "afl-worker" in words]) == 2, "in the cluster, and at a site"


def test_examples_and_claims_are_there() -> None:
    assert (
        {*re.findall(r"deploy/helm/([a-z-]+)\.yaml", PAGE)}
        == {*EXAMPLES}
        == {path.stem for path in FOLDER.glob("*.yaml")}
    )
    for name in EXAMPLES:
        assert f"deploy/helm/{name}.yaml" in (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    workers = the(rendered("cluster"), "StatefulSet", "afl-worker")["spec"]["volumeClaimTemplates"]
    templates = {each["metadata"]["name"] for each in workers}
    assert set(re.findall(r"`(\w+)-afl-worker-N`", PAGE)) == templates
    for kind, name in re.findall(r"(service|statefulset)/(afl-\w+)", PAGE):
        assert [
            each for each in of_kind(rendered("cluster"), *KINDS[kind]) if each["metadata"]["name"] == name
        ]


KINDS = {"service": ("Service",), "statefulset": ("StatefulSet",)}
