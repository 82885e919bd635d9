"""What the chart renders: it fits the schemas, and what it names is there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deployment_manifests import (
    ALL,
    CHART,
    COMBINATIONS,
    EXAMPLES,
    ROOT,
    Document,
    Values,
    build,
    command,
    environment,
    example_values,
    helm,
    of_kind,
    ordinals,
    pod_specs,
    rendered,
    the,
)

import afl_server.main
import afl_worker.main
from afl.config import Config, load_config
from afl.site.policy import Policy
from afl_tools.docs import chart

VERSIONS = ("1.28.0", kubernetes_validate.latest_version())
"""The oldest that the manifests are for (pod-index labels), and the newest whose schemas there are."""

OF_OTHERS = frozenset({"ServiceMonitor", "PrometheusRule", "Certificate", "Issuer"})
"""Kinds that the Prometheus operator and cert-manager bring; their schemas are theirs."""

ENDING_S = 15
"""What a server needs beyond its grace: to tell its workers, and to close its files."""


@pytest.fixture(params=ALL)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return rendered(request.param)


def only_with(documents: list[Document], name: str) -> None:
    """Skip what is about a part that is not rendered."""
    if name not in dict(pod_specs(documents)):
        pytest.skip(f"no {name} here")


def config_of(documents: list[Document], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """What the server would read."""
    (container,) = the(documents, "StatefulSet", "afl-server")["spec"]["template"]["spec"]["containers"]
    for name, value in environment(container, 0).items():
        monkeypatch.setenv(name, value)
    mounted = the(documents, "ConfigMap", "afl-server")
    path = folder / "server.yaml"
    path.write_text(mounted["data"]["server.yaml"], encoding="utf-8")
    return load_config(path, [])


def test_helm_s_own_linter_finds_nothing() -> None:
    for example in (None, *EXAMPLES):
        values = [] if example is None else ["--values", str(CHART.parent / f"{example}.yaml")]
        done = subprocess.run(
            [helm(), "lint", "--strict", str(CHART), *values], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_they_fit_the_schemas(documents: list[Document]) -> None:
    checked = 0
    for document in documents:
        if document["kind"] in OF_OTHERS:
            continue
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
        checked += 1
    assert checked >= 5


def test_a_wrong_manifest_does_not_fit(documents: list[Document]) -> None:
    wrong = of_kind(documents, "StatefulSet")[0]
    wrong["spec"]["replicas"] = "1"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_no_namespace_is_needed(documents: list[Document]) -> None:
    for document in documents:
        assert "namespace" not in document["metadata"]
        assert document["metadata"]["labels"]


def selectors(documents: list[Document]) -> list[dict[str, str]]:
    """Every selector of pods or services, wherever it is; of a network policy also its peers by pod alone."""
    found: list[dict[str, str]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in {"podSelector", "labelSelector"} and "namespaceSelector" not in value:
                    found.append(inner["matchLabels"])
                elif key == "selector":
                    found.append(inner.get("matchLabels", inner))
                else:
                    look(inner)
        elif isinstance(value, list):
            for inner in value:
                look(inner)

    for document in documents:
        look(document.get("spec", {}))
    return found


@pytest.mark.parametrize("combination", ALL)
def test_two_releases_in_one_namespace_share_no_object_and_no_selector(combination: str) -> None:
    """Nor do two whose long names begin alike."""
    long = "a-federation-with-a-name-as-long-as-helm-lets-it-be-"
    one, other, *alike = (
        build(*COMBINATIONS[combination], release=name)
        for name in ("second", "second-afl", long + "1", long + "2")
    )
    for first, second in ((one, other), alike):
        names = [
            {(each["kind"], each["metadata"]["name"]) for each in documents} for documents in (first, second)
        ]
        assert not names[0] & names[1]
        for kind, name in names[0] | names[1]:
            assert len(name) <= (52 if kind == "StatefulSet" else 63), "or a pod's labels do not fit"
        for here, there in ((first, second), (second, first)):
            assert len(selectors(here)) >= 3
            labels = [each["metadata"]["labels"] for each in there]
            labels += [
                each["spec"]["template"]["metadata"]["labels"] for each in of_kind(there, "StatefulSet")
            ]
            for selector in selectors(here):
                assert selector, "an empty selector is everything"
                assert not [each for each in labels if selector.items() <= each.items()]


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
        assert {"state"} == claims if name == "afl-server" else {"journal"} <= claims <= {"journal", "data"}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes | claims
        assert pod["serviceAccountName"] in accounts
        wanted = {"afl-server"} if name == "afl-server" else {"afl-worker", "ours"}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
            if "secret" in volume:
                # By hand, under these names, or by cert-manager: the page on Kubernetes says how.
                assert volume["secret"]["secretName"] in wanted
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
            assert port["appProtocol"] in {"http", "https", "kubernetes.io/h2c"}
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
        assert [each["metadata"]["name"] for each in scraped] == [monitor["metadata"]["name"]], "scraped once"
        stays = "service" if monitor["metadata"]["name"] == "afl-server" else "pod"
        assert {
            "targetLabel": "instance",
            "sourceLabels": ["namespace", stays],
            "separator": "/",
        } in endpoint["relabelings"]
        (port,) = (
            rule["ports"]
            for policy in of_kind(documents, "NetworkPolicy")
            if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
            for rule in policy["spec"]["ingress"]
            if {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
            in rule.get("from", [])
        )
        assert port == [{"port": "http", "protocol": "TCP"}]


def test_network_policies_and_budgets_select_pods_and_name_their_ports(documents: list[Document]) -> None:
    guarded = set()
    sets = {each["metadata"]["name"] for each in of_kind(documents, "StatefulSet")}
    for policy in of_kind(documents, "NetworkPolicy"):
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert selected(documents, labels), policy["metadata"]["name"]
        guarded |= {each["metadata"]["name"] for each in selected(documents, labels)}
        for rule in policy["spec"].get("ingress", []):
            assert {port["port"] for port in rule["ports"]} <= port_numbers(documents, labels).keys()
        for rule in policy["spec"].get("egress", []):
            for peer in rule["to"]:
                for port in rule["ports"] if "podSelector" in peer else ():
                    numbers = port_numbers(documents, peer["podSelector"]["matchLabels"])
                    assert port["port"] in numbers.values()
    assert not guarded or guarded == sets
    (budget,) = of_kind(documents, "PodDisruptionBudget")
    chosen = selected(documents, budget["spec"]["selector"]["matchLabels"])
    assert len(chosen) == len(sets)


def test_a_site_reaches_the_server_s_address_and_names_and_nothing_else() -> None:
    def reached(combination: str) -> list[Document]:
        (policy,) = of_kind(rendered(combination), "NetworkPolicy")
        egress: list[Document] = policy["spec"]["egress"]
        assert combination != "site" or policy["spec"]["ingress"] == []
        return egress

    to_server, to_names = reached("site")
    assert to_server == {
        "to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}],
        "ports": [{"port": 50051, "protocol": "TCP"}],
    }
    assert {port["port"] for port in to_names["ports"]} == {53}
    through_proxy, _ = reached("site, full")
    assert through_proxy["ports"] == [{"port": 3128, "protocol": "TCP"}]


def test_a_server_lets_in_its_own_workers_or_whom_the_values_name() -> None:
    def sources(example: str | None, changed: Values) -> list[Any]:
        policy = the(build(example, changed), "NetworkPolicy", "afl-server")
        return [rule.get("from") for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == "grpc"]

    own = {"app.kubernetes.io/name": "afl", "app.kubernetes.io/instance": "afl"}
    workers = {"podSelector": {"matchLabels": {**own, "app.kubernetes.io/component": "worker"}}}
    theirs = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "theirs"}}}
    assert sources(None, {}) == [[workers]]
    assert sources(None, {"server": {"ingressFrom": [theirs]}}) == [[workers, theirs]]
    assert sources("server", {}) == [None]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"server": {"wrokers": 3}}, "'wrokers' not allowed"),
        ({"server": {"workers": 0}}, "minimum: got 0, want 1"),
        ({"server": {"run": "../other"}}, "'/server/run'"),
        ({"task": None}, "task is required"),
        ({"server": {"public": "Ingress"}}, "server.host is required"),
        ({"server": {"enabled": False}, "site": {"enabled": True}}, "site.host is required"),
        ({"site": {"enabled": True, "host": "a.example.org"}}, "site.egressTo is required"),
        (
            {
                "server": {"enabled": False},
                "site": {"enabled": True, "host": "a.example.org"},
                "certManager": {"enabled": True},
            },
            "certManager.enabled is for a release with the server",
        ),
        ({"site": {"enabled": True, "host": "a.example.org", "egressTo": [{}]}}, "'/site/egressTo/0'"),
    ],
)
def test_wrong_values_are_refused_and_the_key_is_named(changed: Values, said: str) -> None:
    with pytest.raises(AssertionError) as refusal:
        build(None, changed)
    assert said in str(refusal.value)


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
    only_with(documents, "afl-server")
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
    """The files of a pod's Secret: cert-manager's, or those that docs/kubernetes.md has put in."""
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    if "items" in secret:
        assert {item["key"] for item in secret["items"]} == {"tls.crt", "tls.key", "ca.crt"}, "cert-manager's"
        return {item["path"] for item in secret["items"]}
    if secret["secretName"] == "afl-server":
        return {"server.pem", "server.key", "ca.pem"}
    if of_kind(documents, "Certificate") or secret["secretName"] == "ours":
        return {"tls.crt", "tls.key", "ca.crt"}
    workers = ordinals(the(documents, "StatefulSet", "afl-worker"))
    return {"ca.pem", *(f"worker-{worker}.{end}" for worker in workers for end in ("pem", "key"))}


def test_the_commands_are_the_daemons_own(documents: list[Document]) -> None:
    for name, pod in pod_specs(documents):
        (container,) = pod["containers"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        for ordinal in ordinals(the(documents, "StatefulSet", name)):
            words = command(container, ordinal)
            assert not [word for word in words if "$(" in word], "every variable is known"
            assert words[0] == name
            if name == "afl-server":
                parsed = afl_server.main.make_server_parser().parse_args(words[1:])
                assert str(parsed.config.parent) in mounts
                assert parsed.config.name in the(documents, "ConfigMap", name)["data"]
                continue
            parsed = afl_worker.main.make_worker_parser().parse_args(words[1:])
            assert afl_worker.main.parse_ids(parsed.id) == (ordinal,)
            host, _, port = parsed.server.partition(":")
            if host != "server.example.org":
                (grpc,) = [
                    each
                    for each in the(documents, "Service", host)["spec"]["ports"]
                    if each["name"] == "grpc"
                ]
                assert (grpc["port"], grpc["targetPort"]) == (int(port), "grpc")
            (probe_port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "http"]
            assert parsed.http == f":{probe_port}"
            assert str(parsed.journal.parent) in mounts
            assert parsed.data_dir in mounts
            if not parsed.insecure:
                files = provided(documents, pod)
                assert {path.name for path in (parsed.ca, parsed.certificate, parsed.key)} <= files
            if parsed.policy is not None:
                assert str(parsed.policy.parent) in mounts
                text = the(documents, "ConfigMap", name)["data"][parsed.policy.name]
                assert Policy.model_validate(yaml.safe_load(text)).audit == Path("/var/lib/afl/audit.jsonl")


def test_what_a_site_sets_is_what_its_workers_do() -> None:
    documents = rendered("site, full")
    ((_, pod),) = pod_specs(documents)
    (container,) = pod["containers"]
    words = command(container, 6)
    assert [*ordinals(the(documents, "StatefulSet", "afl-worker"))] == [5, 6, 7]
    for word in (
        *("--id=6", "--server=server.example.org:443", "--min-batch=16", "--name=north-6", "--server-name=a"),
        *("--policy=/etc/afl/site/site.yaml", "--certificate=/etc/afl/tls/tls.crt", "--task=fashion-mnist"),
    ):
        assert word in words
    assert "--no-proxy" not in words
    assert environment(container, 6)["https_proxy"] == "http://proxy.example.org:3128"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["tolerations"] == [{"key": "ours", "operator": "Exists"}, gpu]
    assert pod["runtimeClassName"] == "nvidia"
    claims = [volume["persistentVolumeClaim"] for volume in pod["volumes"] if volume["name"] == "data"]
    assert claims == [{"claimName": "records", "readOnly": True}]
    (spread,) = pod["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == (
        "kubernetes.io/hostname",
        "ScheduleAnyway",
    )


@pytest.mark.parametrize("combination", ["cluster, full", "site, full"])
def test_what_is_said_of_where_pods_run_is_in_every_pod(combination: str) -> None:
    for _, pod in pod_specs(rendered(combination)):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert (pod["priorityClassName"], pod["nodeSelector"]) == ("high", {"pool": "ours"})
        assert {"key": "ours", "operator": "Exists"} in pod["tolerations"]
        assert "nodeAffinity" in pod["affinity"]
        assert {"name": "OURS", "value": "1"} in pod["containers"][0]["env"]


def test_certificates_name_who_they_are_for(documents: list[Document]) -> None:
    for certificate in of_kind(documents, "Certificate"):
        spec = certificate["spec"]
        issuers = {each["metadata"]["name"] for each in of_kind(documents, "Issuer")}
        assert spec["issuerRef"]["name"] in issuers
        if "server auth" in spec.get("usages", ()):
            assert {"afl-server", "afl-server.ours.svc"} <= {*spec["dnsNames"]}
        if "client auth" in spec.get("usages", ()):
            workers = ordinals(the(documents, "StatefulSet", "afl-worker"))
            assert spec["uris"] == [f"afl:worker:{workers[0]}-{workers[-1]}"]


def test_what_most_people_change_is_in_one_place() -> None:
    images = {
        "server": "registry.example.org/ours@sha256:" + "0" * 64,
        "site": "registry.example.org/our-worker:2",
    }
    changed = {
        "task": "our_package.ours:Ours",
        "server": {"image": images["server"], "workers": 7, "run": "second"},
        "site": {"image": images["site"]},
    }
    documents = build("cluster", changed)
    pods = dict(pod_specs(documents))
    server, worker = (pods[name]["containers"][0] for name in ("afl-server", "afl-worker"))
    assert (server["image"], worker["image"]) == tuple(images.values())
    wanted = {"AFL_WORKERS": "7", "AFL_TASK": changed["task"], "AFL_RUN": "second"}
    assert environment(server, 0) == wanted
    assert the(documents, "StatefulSet", "afl-worker")["spec"]["replicas"] == 7
    assert f"--task={changed['task']}" in command(worker, 0)


def test_a_changed_configuration_starts_every_pod_again() -> None:
    """By a checksum in each pod's template."""
    before = dict(pod_specs(build("cluster", {}), template=True))
    config = the(build("cluster", {}), "ConfigMap", "afl-server")["data"]["server.yaml"]
    changed = {"server": {"config": config.replace("eta_w: 0.05", "eta_w: 0.04")}}
    after = dict(pod_specs(build("cluster", changed), template=True))
    assert before.keys() == after.keys() == {"afl-server", "afl-worker"}
    assert all(before[name] != after[name] for name in before)


def test_a_configuration_from_a_file_is_as_it_was_written(tmp_path: Path) -> None:
    """Comments, quotes, large and small numbers: Helm makes floats of numbers in values."""
    text = '# Ours\nworkers: ${AFL_WORKERS}\nalgorithm: {rounds: 1000000, eta_w: 0.00001, note: "{{ x }}"}\n'
    (tmp_path / "server.yaml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [helm(), "template", "afl", str(CHART), "--set-file", f"server.config={tmp_path / 'server.yaml'}"],
        check=True,
        capture_output=True,
        text=True,
    )
    found = the([each for each in yaml.safe_load_all(done.stdout) if each], "ConfigMap", "afl-server")
    assert found["data"]["server.yaml"] == text


@pytest.mark.parametrize(("name", "part"), [("cluster, issued", "server"), ("site, full", "worker")])
def test_rules_and_dashboards_are_those_of_deploy(name: str, part: str) -> None:
    documents = rendered(name)
    (resource,) = of_kind(documents, "PrometheusRule")
    assert resource["apiVersion"] == "monitoring.coreos.com/v1"
    assert resource["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text("utf-8"))
    assert resource["metadata"]["labels"]["release"] == "prometheus"
    board = the(documents, "ConfigMap", "afl-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    for each in (resource, board):
        assert each["metadata"]["labels"]["app.kubernetes.io/component"] == part
    dashboards = {"afl.json", "afl-site.json"}
    assert board["data"].keys() == dashboards
    for file in dashboards:
        dashboard = json.loads((ROOT / "deploy/grafana" / file).read_text("utf-8"))
        assert json.loads(board["data"][file]) == dashboard
    assert not of_kind(rendered("cluster"), "PrometheusRule", "ServiceMonitor")


def test_the_schema_and_the_page_have_every_value() -> None:
    """And what values.yaml says, the schema takes: Helm checks it at each of these tests."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"].keys() == example_values("default").keys() | {"global"}

    def check(section: dict[str, Any], values: Values, above: str) -> None:
        if "properties" in section:
            assert section["additionalProperties"] is False, above
            assert section["properties"].keys() - {"global"} == values.keys(), above
            for key, value in values.items():
                check(section["properties"][key], value, f"{above}.{key}")

    check(schema, example_values("default"), "")
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    assert len(chart.values()) > 50
    for value in chart.values():
        assert f"| `{value.name}` |" in page


def test_no_secret_is_in_the_manifests(documents: list[Document]) -> None:
    text = json.dumps(documents)
    assert not of_kind(documents, "Secret")
    assert "PRIVATE KEY" not in text
    for _, pod in pod_specs(documents):
        for container in pod["containers"]:
            names: list[Any] = [entry["name"] for entry in container["env"]]
            assert "AFL_TOKEN" not in names
