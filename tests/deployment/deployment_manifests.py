"""What the chart of deploy/helm renders, for its example values and for each of its options."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "helm"
CHART = FOLDER / "afl"

EXAMPLES = ("cluster", "server", "site", "laptop")
"""Files of values beside the chart."""

Document = dict[str, Any]
Values = dict[str, Any]

_MONITORING: Values = {
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboard": {"enabled": True},
    }
}
_PLACED: Values = {
    "priorityClassName": "high",
    "nodeSelector": {"pool": "ours"},
    "tolerations": [{"key": "ours", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "env": [{"name": "OURS", "value": "1"}],
}
_PEER: Values = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "theirs"}}}
_FULL_SERVER: Values = {
    **_MONITORING,
    "imagePullSecrets": [{"name": "registry"}],
    "certManager": {"enabled": True},
    "server": {
        **_PLACED,
        "public": "Ingress",
        "host": "server.example.org",
        "publicAnnotations": {"example.org/ours": "yes"},
        "ingressClassName": "nginx",
        "ingressFrom": [_PEER],
        "sourceRanges": ["192.0.2.0/24"],
        "storage": {"size": "20Gi", "className": "fast"},
        "extraArgs": ["--log-level=debug"],
    },
}
_FULL_SITE: Values = {
    **_MONITORING,
    "imagePullSecrets": [{"name": "registry"}],
    "site": {
        **_PLACED,
        "firstId": 5,
        "count": 3,
        "port": 443,
        "egressTo": [{"ipBlock": {"cidr": "203.0.113.7/32"}}],
        "proxy": "proxy.example.org:3128",
        "minBatch": 16,
        "tls": {
            "secret": "ours",
            "certificate": "tls.crt",
            "key": "tls.key",
            "ca": "ca.crt",
            "serverName": "a",
        },
        "gpu": {"count": 2},
        "runtimeClassName": "nvidia",
        "data": {"existingClaim": "records"},
        "journal": {"size": "1Gi", "className": "fast"},
        "extraArgs": ["--name=north-$(AFL_WORKER_ID)"],
    },
}

COMBINATIONS: dict[str, tuple[str | None, Values]] = {
    "default": (None, {}),
    **{name: (name, {}) for name in EXAMPLES},
    "cluster, issued": ("cluster", {"certManager": {"enabled": True}, **_MONITORING}),
    "cluster, full": ("cluster", {**_FULL_SERVER, "site": {**_PLACED, "topologyKey": None}}),
    "server, full": ("server", _FULL_SERVER),
    "server, by the sites' addresses": ("server", {"server": {"sourceRanges": ["192.0.2.0/24"]}}),
    "site, full": ("site", _FULL_SITE),
    "no network policies": ("laptop", {"networkPolicy": {"enabled": False}}),
}
"""An example, and the values that are set beside it."""

ALL = list(COMBINATIONS)


def helm() -> str:
    """The program: what ``make helm`` puts beside Python, or one on the PATH."""
    beside = Path(sys.executable).with_name("helm")
    found = str(beside) if beside.is_file() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is not installed: make helm")
    return found


def build(
    example: str | None, changed: Values, *, release: str = "afl", folder: Path = FOLDER
) -> list[Document]:
    """The documents that would be applied.

    Raises:
        AssertionError: with what Helm says.
    """
    values = ["--values", "-"] if changed else []
    if example is not None:
        values = ["--values", str(folder / f"{example}.yaml"), *values]
    done = subprocess.run(
        [helm(), "template", release, str(CHART), "--namespace", "ours", *values],
        check=False,
        capture_output=True,
        text=True,
        input=json.dumps(changed),
    )
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def rendered(combination: str) -> list[Document]:
    """The documents of a combination; each call has its own."""
    documents: list[Document] = json.loads(_rendered(combination))
    return documents


@cache
def _rendered(combination: str) -> str:
    return json.dumps(build(*COMBINATIONS[combination]))


def example_values(example: str) -> Values:
    """Of an example, or the chart's own."""
    path = CHART / "values.yaml" if example == "default" else FOLDER / f"{example}.yaml"
    values: Values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def ordinals(stateful_set: Document) -> range:
    """The numbers of its pods."""
    first = stateful_set["spec"].get("ordinals", {}).get("start", 0)
    return range(first, first + stateful_set["spec"]["replicas"])


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def the(documents: list[Document], kind: str, name: str) -> Document:
    """The one document of this kind and name."""
    (found,) = [each for each in of_kind(documents, kind) if each["metadata"]["name"] == name]
    return found


def pod_specs(documents: list[Document], *, template: bool = False) -> Iterator[tuple[str, Document]]:
    """Name and pod's specification of each StatefulSet, or all of the pod's template."""
    for document in of_kind(documents, "StatefulSet"):
        found = document["spec"]["template"]
        yield document["metadata"]["name"], found if template else found["spec"]


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
