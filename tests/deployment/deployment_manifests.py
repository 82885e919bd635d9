"""What the kustomizations of deploy/kubernetes say, built by ``kubectl kustomize``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"

OVERLAYS = ("cluster", "server-only", "laptop")

COMBINATIONS = {
    "cluster": [(), ("cert-manager", "cert-manager-workers"), ("monitoring",)],
    "server-only": [(), ("cert-manager",), ("monitoring",), ("ingress", "cert-manager", "monitoring")],
    "laptop": [(), ("monitoring",)],
}
"""Of each overlay, sets of the components that its kustomization has commented out."""

ALL = [(overlay, added) for overlay, sets in COMBINATIONS.items() for added in sets]

Document = dict[str, Any]


def named(combination: tuple[str, tuple[str, ...]]) -> str:
    overlay, added = combination
    return "+".join((overlay, *added))


def copied(folder: Path) -> Path:
    """A copy that a test may edit as a user would."""
    return Path(shutil.copytree(FOLDER, folder / "kubernetes"))


def uncomment(kustomization: Path, component: str) -> None:
    """Take a component in, as a user does: by removing the ``#`` before its line."""
    text = kustomization.read_text(encoding="utf-8")
    changed, count = re.subn(
        rf"^  # (- \S+/components/{component}(?: .*)?)$", r"  \1", text, flags=re.MULTILINE
    )
    assert count == 1, f"{kustomization} has no line to uncomment for {component}"
    kustomization.write_text(changed, encoding="utf-8")


def set_setting(settings: Path, key: str, value: str) -> None:
    """Change a line of an overlay's settings.yaml."""
    text = settings.read_text(encoding="utf-8")
    changed, count = re.subn(rf"^  {key}: .*$", f'  {key}: "{value}"', text, flags=re.MULTILINE)
    assert count == 1, f"{settings} has no {key}"
    settings.write_text(changed, encoding="utf-8")


def build(folder: Path) -> list[Document]:
    """The documents that would be applied.

    Raises:
        AssertionError: with what kustomize says.
    """
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def rendered(combination: tuple[str, tuple[str, ...]]) -> list[Document]:
    """The documents of an overlay with components; each call has its own."""
    documents: list[Document] = json.loads(_rendered(combination))
    return documents


@cache
def _rendered(combination: tuple[str, tuple[str, ...]]) -> str:
    overlay, added = combination
    with tempfile.TemporaryDirectory() as folder:
        place = copied(Path(folder)) / "overlays" / overlay
        for component in added:
            uncomment(place / "kustomization.yaml", component)
        return json.dumps(build(place))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def the(documents: list[Document], kind: str, name: str) -> Document:
    """The one document of this kind and name."""
    (found,) = [each for each in of_kind(documents, kind) if each["metadata"]["name"] == name]
    return found


def pod_specs(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Name and pod's specification of each StatefulSet."""
    for document in of_kind(documents, "StatefulSet"):
        yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def expanded(text: str, values: dict[str, str]) -> str:
    """``$(NAME)`` as Kubernetes fills it in: what is not known stays."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda match: values.get(match[1], match[0]), text)


def environment(container: Document, ordinal: int) -> dict[str, str]:
    """The variables of a container in the pod of this ordinal; each may refer to those before it."""
    values: dict[str, str] = {}
    for entry in container.get("env", []):
        if "value" in entry:
            values[entry["name"]] = expanded(entry["value"], values)
        else:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.labels['apps.kubernetes.io/pod-index']", path
            values[entry["name"]] = str(ordinal)
    return values


def command(container: Document, ordinal: int) -> list[str]:
    """The command line that Kubernetes would run."""
    values = environment(container, ordinal)
    return [expanded(word, values) for word in [*container["command"], *container["args"]]]
