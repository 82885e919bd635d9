"""The Kubernetes manifests: they build, fit the schemas, and what they name is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deployment_manifests import (
    ALL,
    COMBINATIONS,
    FOLDER,
    OVERLAYS,
    Document,
    build,
    command,
    copied,
    environment,
    named,
    of_kind,
    pod_specs,
    rendered,
    set_setting,
    the,
)

import afl_server.main
import afl_worker.main
from afl.config import Config, load_config

VERSIONS = ("1.28.0", kubernetes_validate.latest_version())
"""The oldest that the manifests are for (pod-index labels), and the newest whose schemas there are."""

OF_OTHERS = frozenset({"ServiceMonitor", "Certificate", "Issuer"})
"""Kinds that the Prometheus operator and cert-manager bring; their schemas are theirs."""

ENDING_S = 15
"""What a server needs beyond its grace: to tell its workers, and to close its files."""


@pytest.fixture(params=ALL, ids=named)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return rendered(request.param)


def config_of(documents: list[Document], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """What the server would read."""
    (container,) = the(documents, "StatefulSet", "afl-server")["spec"]["template"]["spec"]["containers"]
    for name, value in environment(container, 0).items():
        monkeypatch.setenv(name, value)
    (mounted,) = of_kind(documents, "ConfigMap")
    path = folder / "server.yaml"
    path.write_text(mounted["data"]["server.yaml"], encoding="utf-8")
    return load_config(path, [])


def test_every_combination_of_a_kustomization_is_tried() -> None:
    for overlay in OVERLAYS:
        text = (FOLDER / "overlays" / overlay / "kustomization.yaml").read_text(encoding="utf-8")
        offered = set(re.findall(r"^  # - \.\./\.\./components/(\S+)", text, re.MULTILINE))
        assert offered == {component for added in COMBINATIONS[overlay] for component in added}, overlay


def test_they_fit_the_schemas(documents: list[Document]) -> None:
    checked = 0
    for document in documents:
        if document["kind"] in OF_OTHERS:
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        checked += 1
    assert checked >= 6


def test_a_wrong_manifest_does_not_fit(documents: list[Document]) -> None:
    wrong = the(documents, "StatefulSet", "afl-server")
    wrong["spec"]["replicas"] = "1"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_no_namespace_is_needed_and_nothing_of_kustomize_is_left(documents: list[Document]) -> None:
    for document in documents:
        assert "namespace" not in document["metadata"]
        assert document["metadata"]["name"] != "afl-settings"
        assert document["metadata"]["labels" if document["kind"] != "ConfigMap" else "name"]


def test_volumes_config_maps_and_secrets_are_there(documents: list[Document]) -> None:
    config_maps = {each["metadata"]["name"] for each in of_kind(documents, "ConfigMap")}
    accounts = {each["metadata"]["name"] for each in of_kind(documents, "ServiceAccount")}
    issued = {each["spec"]["secretName"] for each in of_kind(documents, "Certificate")}
    for name, pod in pod_specs(documents):
        templates = the(documents, "StatefulSet", name)["spec"]["volumeClaimTemplates"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        claims = {template["metadata"]["name"] for template in templates}
        (container,) = pod["containers"]
        assert not volumes & claims
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claims
        assert pod["serviceAccountName"] in accounts
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
            if "secret" in volume:
                # By hand, under these names, or by cert-manager: the page on Kubernetes says how.
                assert volume["secret"]["secretName"] in {"afl-server", "afl-workers"}
                assert not issued or volume["secret"]["secretName"] in issued


def selected(documents: list[Document], labels: dict[str, str]) -> list[Document]:
    return [
        each
        for each in of_kind(documents, "StatefulSet")
        if labels.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]


def port_numbers(documents: list[Document], labels: dict[str, str]) -> dict[str, int]:
    """The named ports of the pods that have these labels."""
    return {
        port["name"]: port["containerPort"]
        for each in selected(documents, labels)
        for container in each["spec"]["template"]["spec"]["containers"]
        for port in container["ports"]
    }


def test_services_monitors_and_ingresses_lead_to_ports_that_there_are(documents: list[Document]) -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "Service")}
    for name, service in services.items():
        ports = port_numbers(documents, service["selector"])
        assert ports, name
        for port in service["ports"]:
            assert ports[port["targetPort"]] == port["port"], (
                "a client's port is the one of the configuration"
            )
    for each in of_kind(documents, "StatefulSet"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert services[each["spec"]["serviceName"]]["selector"].items() <= labels.items()
    for ingress in of_kind(documents, "Ingress"):
        (rule,) = ingress["spec"]["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert backend["port"]["name"] in {port["name"] for port in services[backend["name"]]["ports"]}
        assert rule["host"] == "server.example.org"
        passed = [key for key in ingress["metadata"]["annotations"] if key.endswith("/ssl-passthrough")]
        assert len(passed) == 3
    for monitor in of_kind(documents, "ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        found = [
            each
            for each in of_kind(documents, "Service")
            if labels.items() <= each["metadata"]["labels"].items()
        ]
        (endpoint,) = monitor["spec"]["endpoints"]
        scraped = [
            each for each in found if endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}
        ]
        assert [each["metadata"]["name"] for each in scraped] == ["afl-server"], "scraped once"


def test_network_policies_and_budgets_select_pods_and_name_their_ports(documents: list[Document]) -> None:
    guarded = set()
    for policy in of_kind(documents, "NetworkPolicy"):
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert selected(documents, labels), policy["metadata"]["name"]
        guarded |= {each["metadata"]["name"] for each in selected(documents, labels)}
        for rule in policy["spec"].get("ingress", []):
            assert {port["port"] for port in rule["ports"]} <= port_numbers(documents, labels).keys()
        for rule in policy["spec"].get("egress", []):
            for peer in rule["to"]:
                for port in rule["ports"] if "podSelector" in peer else ():
                    assert port["port"] in port_numbers(documents, peer["podSelector"]["matchLabels"])
    assert guarded == {each["metadata"]["name"] for each in of_kind(documents, "StatefulSet")}
    (budget,) = of_kind(documents, "PodDisruptionBudget")
    chosen = selected(documents, budget["spec"]["selector"]["matchLabels"])
    assert len(chosen) == len(of_kind(documents, "StatefulSet"))


def test_the_servers_gate_to_other_networks_is_grpc_alone(documents: list[Document]) -> None:
    public = [each for each in of_kind(documents, "Service") if each["spec"].get("type") == "LoadBalancer"]
    for service in public:
        assert [port["name"] for port in service["spec"]["ports"]] == ["grpc"]
    for policy in of_kind(documents, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            if "from" not in rule:
                assert [port["port"] for port in rule["ports"]] == ["grpc"]


def test_the_configuration_is_what_the_pod_offers(
    documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(documents, tmp_path, monkeypatch)
    stateful = the(documents, "StatefulSet", "afl-server")
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.server.http is not None
    assert (config.server.listen.port, config.server.http.port) == (ports["grpc"], ports["http"])
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert config.run.directory is not None
    state = mounts[str(Path(config.run.directory).parent)]
    assert state["name"] in {each["metadata"]["name"] for each in stateful["spec"]["volumeClaimTemplates"]}
    assert pod["terminationGracePeriodSeconds"] >= config.server.grace + ENDING_S
    probe = container["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60, "a long pause is no death"
    tls = config.server.tls
    assert config.server.insecure == (tls is None)
    if tls is not None:
        assert tls.client_ca is not None, "who a worker is must be known"
        files = provided(documents, pod)
        for path in (tls.certificate, tls.key, tls.client_ca):
            assert Path(path).name in files
            assert str(Path(path).parent) in mounts


def provided(documents: list[Document], pod: Document) -> set[str]:
    """The files of a pod's Secret: those that are picked, or those that docs/kubernetes.md has put in."""
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    if "items" in secret:
        assert {item["key"] for item in secret["items"]} == {"tls.crt", "tls.key", "ca.crt"}, "cert-manager's"
        return {item["path"] for item in secret["items"]}
    if secret["secretName"] == "afl-server":
        return {"server.pem", "server.key", "ca.pem"}
    workers = range(the(documents, "StatefulSet", "afl-worker")["spec"]["replicas"])
    return {"ca.pem", *(f"worker-{worker}.{end}" for worker in workers for end in ("pem", "key"))}


def test_the_commands_are_the_daemons_own(documents: list[Document], tmp_path: Path) -> None:
    for name, pod in pod_specs(documents):
        (container,) = pod["containers"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for ordinal in range(the(documents, "StatefulSet", name)["spec"]["replicas"]):
            words = command(container, ordinal)
            assert not [word for word in words if "$(" in word], "every variable is known"
            assert words[0] == name
            if name == "afl-server":
                parsed = afl_server.main.make_server_parser().parse_args(words[1:])
                assert str(parsed.config.parent) in mounts
                assert parsed.config.name in of_kind(documents, "ConfigMap")[0]["data"]
                continue
            parsed = afl_worker.main.make_worker_parser().parse_args(words[1:])
            assert afl_worker.main.parse_ids(parsed.id) == (ordinal,)
            host, _, port = parsed.server.partition(":")
            assert {"name": "grpc", "port": int(port), "targetPort": "grpc"} in the(
                documents, "Service", host
            )["spec"]["ports"]
            (probe_port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "http"]
            assert parsed.http == f":{probe_port}"
            assert str(parsed.journal.parent) in mounts
            assert parsed.data_dir in mounts
            if not parsed.insecure:
                files = provided(documents, pod)
                assert {path.name for path in (parsed.ca, parsed.certificate, parsed.key)} <= files


def test_certificates_name_who_they_are_for(documents: list[Document]) -> None:
    for certificate in of_kind(documents, "Certificate"):
        spec = certificate["spec"]
        issuers = {each["metadata"]["name"] for each in of_kind(documents, "Issuer")}
        assert spec["issuerRef"]["name"] in issuers
        if "server auth" in spec.get("usages", ()):
            assert "afl-server" in spec["dnsNames"]
        if "client auth" in spec.get("usages", ()):
            assert [uri for uri in spec["uris"] if uri.startswith("afl:worker:")]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_most_people_change_is_in_one_place(overlay: str, tmp_path: Path) -> None:
    place = copied(tmp_path) / "overlays" / overlay
    changed = {
        "server-image": "registry.example.org/ours@sha256:" + "0" * 64,
        "worker-image": "registry.example.org/our-worker:2",
        "workers": "7",
        "task": "our_package.ours:Ours",
        "run": "second",
        "storage-class": "fast",
    }
    has_workers = overlay != "server-only"
    for key, value in changed.items():
        if key != "worker-image" or has_workers:
            set_setting(place / "settings.yaml", key, value)
    settings = yaml.safe_load((place / "settings.yaml").read_text(encoding="utf-8"))["data"]
    assert settings.keys() - changed.keys() == {"host"}
    documents = build(place)
    pods = dict(pod_specs(documents))
    server = pods["afl-server"]["containers"][0]
    assert server["image"] == changed["server-image"]
    wanted = {"AFL_WORKERS": "7", "AFL_TASK": changed["task"], "AFL_RUN": "second"}
    assert environment(server, 0) == wanted
    for each in of_kind(documents, "StatefulSet"):
        for claim in each["spec"]["volumeClaimTemplates"]:
            assert claim["spec"]["storageClassName"] == "fast"
    assert ("afl-worker" in pods) == has_workers
    if has_workers:
        worker = pods["afl-worker"]["containers"][0]
        assert worker["image"] == changed["worker-image"]
        assert the(documents, "StatefulSet", "afl-worker")["spec"]["replicas"] == 7
        assert f"--task={changed['task']}" in command(worker, 0)


def test_a_changed_configuration_starts_every_pod_again(tmp_path: Path) -> None:
    """The name of the ConfigMap changes with its content, and with it each pod's template."""
    place = copied(tmp_path) / "overlays" / "cluster"
    before = dict(pod_specs(build(place)))
    config = place / "server.yaml"
    config.write_text(
        config.read_text(encoding="utf-8").replace("eta_w: 0.05", "eta_w: 0.04"), encoding="utf-8"
    )
    after = dict(pod_specs(build(place)))
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)


def test_no_secret_is_in_the_manifests(documents: list[Document]) -> None:
    text = json.dumps(documents)
    assert not of_kind(documents, "Secret")
    assert "PRIVATE KEY" not in text
    for _, pod in pod_specs(documents):
        for container in pod["containers"]:
            names: list[Any] = [entry["name"] for entry in container["env"]]
            assert "AFL_TOKEN" not in names
