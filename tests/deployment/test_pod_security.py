"""What the manifests are held to: the restricted Pod Security Standard, and checkov where it is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment_manifests import ALL, ROOT, Document, of_kind, pod_specs, rendered
from deployment_pods import CONTAINERFILE

ACCEPTED = yaml.safe_load((ROOT / "deploy" / "accepted-findings.yaml").read_text(encoding="utf-8"))
"""Reasons by checkov's numbers of the checks that fail."""

USER = 10001


@pytest.fixture(params=ALL)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return rendered(request.param)


def test_pods_are_restricted(documents: list[Document]) -> None:
    for name, pod in pod_specs(documents):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == USER
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "initContainers"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        for volume in pod["volumes"]:
            assert volume.keys() - {"name"} <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in container["ports"])
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][kind].keys()


def test_what_a_container_writes_to_is_bounded_and_all_else_is_read_only(documents: list[Document]) -> None:
    for _, pod in pod_specs(documents):
        for volume in pod["volumes"]:
            if "emptyDir" in volume:
                assert "sizeLimit" in volume["emptyDir"]
            if "secret" in volume:
                assert volume["secret"]["defaultMode"] == 0o440
        for container in pod["containers"]:
            writable = {
                mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
            }
            assert writable == {"/var/lib/afl", "/tmp"}


@pytest.mark.parametrize("combination", [each for each in ALL if each != "no network policies"])
def test_every_pod_is_under_a_network_policy_that_closes_both_ways(combination: str) -> None:
    documents = rendered(combination)
    closed = [
        policy["spec"]["podSelector"]["matchLabels"]
        for policy in of_kind(documents, "NetworkPolicy")
        if set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    ]
    for each in of_kind(documents, "StatefulSet"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert [wanted for wanted in closed if wanted.items() <= labels.items()]


def checkov(folder: Path, framework: str) -> list[dict[str, Any]]:
    """The checks that fail; none is left out."""
    program = os.environ.get("AFL_CHECKOV") or shutil.which("checkov")
    if not program:
        pytest.skip("checkov is not installed: make policy")
    options = ["--framework", framework, "--compact", "--quiet", "--skip-download", "--output", "json"]
    done = subprocess.run([program, "-d", str(folder), *options], check=False, capture_output=True, text=True)
    report = json.loads(done.stdout)
    (result,) = report if isinstance(report, list) else [report]
    assert result["summary"]["passed"] > 10, done.stderr
    assert not result["summary"]["parsing_errors"]
    failed: list[dict[str, Any]] = result["results"]["failed_checks"]
    return failed


@pytest.mark.timeout(300)
def test_checkov_finds_nothing_without_a_written_reason(tmp_path: Path) -> None:
    scanned = tmp_path / "scanned"
    scanned.mkdir()
    for combination in ALL:
        text = yaml.safe_dump_all(rendered(combination))
        (scanned / f"{combination}.yaml").write_text(text, encoding="utf-8")
    found = {check["check_id"]: check["check_name"] for check in checkov(scanned, "kubernetes")}
    containers = tmp_path / "containers"
    containers.mkdir()
    shutil.copy(CONTAINERFILE, containers / "Dockerfile")
    found |= {check["check_id"]: check["check_name"] for check in checkov(containers, "dockerfile")}
    assert found.keys() == ACCEPTED.keys(), found


def test_every_accepted_finding_has_a_reason() -> None:
    assert ACCEPTED
    assert all(isinstance(reason, str) and len(reason) > 30 for reason in ACCEPTED.values())
