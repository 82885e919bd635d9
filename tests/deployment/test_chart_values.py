"""Values of the chart that are odd, wrong or missing: refused with their key, or written down as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from deployment_manifests import (
    CHART,
    COMBINATIONS,
    Document,
    Values,
    build,
    command,
    example_values,
    of_kind,
    pod_specs,
    the,
)

SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@pytest.mark.parametrize("release", ["true", "e1", "a" * 53, "a-" * 26 + "b", "afl-server", "afl"])
@pytest.mark.parametrize("combination", ["cluster, full", "site, full"])
def test_names_and_labels_are_such_as_kubernetes_takes(combination: str, release: str) -> None:
    for document in build(*COMBINATIONS[combination], release=release):
        metadata = document["metadata"]
        assert len(metadata["name"]) <= 52, "a StatefulSet's name, with a revision's hash, is a label"
        if document["kind"] == "Service":
            assert SERVICE_NAME.fullmatch(metadata["name"])
        for value in metadata["labels"].values():
            assert LABEL.fullmatch(value), "text, and not what YAML reads as a number or as true"


@pytest.mark.parametrize("release", ["a.b", "1st", "9", "1e5", "a" * 40 + ".b"])
def test_a_release_whose_services_could_not_be_made_is_refused(release: str) -> None:
    with pytest.raises(
        AssertionError, match=re.escape(f"the release cannot be called {release}: its Services")
    ):
        build("site", {}, release=release)


def values_with_a_default(section: dict[str, Any], values: Values, above: str = "") -> Iterator[str]:
    """The paths of those that cannot be null, nor are empty at first."""
    for key, value in values.items():
        schema = section["properties"][key]
        if value is None or value in ([], {}) or "null" in schema.get("type", ()):
            continue
        yield f"{above}.{key}"
        if "properties" in schema and "$ref" not in schema:
            yield from values_with_a_default(schema, value, f"{above}.{key}")


def test_a_value_that_is_needed_cannot_be_taken_away() -> None:
    """Null takes a default away: of site.tls.enabled, it would be plaintext, unsaid."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    found = list(values_with_a_default(schema, example_values("default")))
    assert {".site.tls.enabled", ".networkPolicy.enabled", ".server.image", ".site.port"} <= {*found}
    for path in found:
        *above, key = path.split(".")[1:]
        section = schema
        for each in above:
            section = section["properties"][each]
        assert key in section["required"], path


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ({"tls": {"enabled": None}}, "'/site/tls': missing property 'enabled'"),
        ({"port": None}, "'/site': missing property 'port'"),
        ({"resources": None}, "'/site': missing property 'resources'"),
        ({"host": "server.example.org:443"}, "'/site/host'"),
        ({"host": "https://server.example.org"}, "'/site/host'"),
        ({"host": "2001:db8::1"}, "'/site/host'"),
        ({"host": "a: b"}, "'/site/host'"),
        ({"egressTo": [{"ipBlock": {"cidr": "203.0.113.7"}}]}, "'/site/egressTo/0/ipBlock/cidr'"),
        ({"egressTo": [{"ipBlock": {"cdir": "203.0.113.7/32"}}]}, "'cdir' not allowed"),
        ({"proxy": "proxy.example.org:03128"}, "'/site/proxy'"),
        ({"env": [{"name": "OURS", "value": 1}]}, "'/site/env/0/value': got number, want string"),
        ({"env": [{"value": "1"}]}, "'/site/env/0': missing property 'name'"),
    ],
)
def test_a_site_s_wrong_value_is_refused_and_the_key_is_named(site: Values, said: str) -> None:
    with pytest.raises(AssertionError) as refusal:
        build("site", {"site": site})
    assert said in str(refusal.value)


def test_more_workers_than_the_server_waits_for_are_refused() -> None:
    """Their ids would be refused by the server, again and again."""
    assert build("cluster", {"server": {"workers": 4}, "site": {"firstId": 2, "count": 2}})
    elsewhere = {"host": "a.example.org", "egressTo": [{"ipBlock": {"cidr": "203.0.113.7/32"}}]}
    assert build("cluster", {"server": {"workers": 4}, "site": {"firstId": 9, "count": 2, **elsewhere}})
    with pytest.raises(
        AssertionError, match=r"name workers up to 4, and server\.workers is 4: ids begin with 0"
    ):
        build("cluster", {"server": {"workers": 4}, "site": {"firstId": 2, "count": 3}})


ODD: Values = {
    "task": "yes: #1",
    "site": {
        "image": "1e3",
        "host": "[2001:db8::1]",
        "minBatch": 1_000_000,
        "terminationGracePeriodSeconds": 1_000_000,
        "topologyKey": "true",
        "journal": {"className": "1e3"},
        "data": {"existingClaim": "123"},
        "tolerations": None,
        "tls": {
            "secret": "123",
            "certificate": "a: b.pem",
            "key": "'a'.key",
            "ca": "a #b",
            "serverName": "1e3",
        },
    },
}


def test_odd_values_are_taken_as_they_are() -> None:
    """Nothing is a number, a comment or a section that was text, and no number is in powers of ten."""
    documents = build("site", ODD)
    for document in documents:
        kubernetes_validate.validate(document, "1.28.0", strict=True)
    stateful: Document = the(documents, "StatefulSet", "afl-worker")
    ((_, pod),) = pod_specs(documents)
    (container,) = pod["containers"]
    words = command(container, 2)
    for word in (
        *("--server=[2001:db8::1]:50051", "--task=yes: #1", "--min-batch=1000000", "--server-name=1e3"),
        *("--certificate=/etc/afl/tls/a: b.pem", "--key=/etc/afl/tls/'a'.key", "--ca=/etc/afl/tls/a #b"),
    ):
        assert word in words
    assert container["image"] == "1e3"
    assert pod["terminationGracePeriodSeconds"] == 1_000_000
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == "true"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["tls"]["secret"]["secretName"] == "123"
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == "123"
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "1e3"


@pytest.mark.parametrize(("name", "right"), [(None, {}), ("", {"storageClassName": ""})])
def test_no_storage_class_is_not_the_default_one(name: str | None, right: Values) -> None:
    """The empty one asks for volumes that somebody has made."""
    claim = {"className": name}
    documents = build("cluster", {"server": {"storage": claim}, "site": {"journal": claim, "data": claim}})
    found = [
        each["spec"]
        for set_ in of_kind(documents, "StatefulSet")
        for each in set_["spec"]["volumeClaimTemplates"]
    ]
    assert len(found) == 3
    for spec in found:
        assert {key: value for key, value in spec.items() if key == "storageClassName"} == right


def test_whom_server_and_workers_call_beside() -> None:
    """A tracker and a collector of traces are behind the policies too, and have names."""
    rule = {"to": [{"ipBlock": {"cidr": "203.0.113.9/32"}}], "ports": [{"port": 4318, "protocol": "TCP"}]}
    for egress in ([], [rule]):
        documents = build("cluster", {"networkPolicy": {"egress": egress}})
        server, worker = (
            the(documents, "NetworkPolicy", name)["spec"]["egress"] for name in ("afl-server", "afl-worker")
        )
        (dns,) = [each for each in worker if each["ports"][0]["port"] == 53]
        assert [each for each in server if each != dns] == egress
        assert (dns in server) == bool(egress), "the server calls nobody"
        assert [each for each in worker if each != dns][1:] == egress
    with pytest.raises(AssertionError, match="missing property 'ports'"):
        build("cluster", {"networkPolicy": {"egress": [{"to": rule["to"]}]}})


def test_a_site_may_have_a_token_and_no_certificate() -> None:
    token = "--token-file=/etc/afl/tls/token-$(AFL_WORKER_ID)"
    site = {"tls": {"certificate": None, "key": None}, "extraArgs": [token]}
    ((_, pod),) = pod_specs(build("site", {"site": site}))
    words = command(pod["containers"][0], 2)
    assert "--token-file=/etc/afl/tls/token-2" in words
    assert "--ca=/etc/afl/tls/ca.pem" in words
    assert not [word for word in words if word.startswith(("--certificate", "--key"))]


@pytest.mark.parametrize(
    "text", ["  # ours\nmin_batch: 32\n", "\n\nmin_batch: 32\n", "# ours\n\n  # too\nmin_batch: 32\n"]
)
def test_files_among_the_values_begin_as_they_like(text: str) -> None:
    """An indented first line, which a plain block of YAML would take for the indentation of all others."""
    documents = build("cluster", {"site": {"policy": text}, "server": {"config": text}})
    mounted = {each["metadata"]["name"]: each["data"] for each in of_kind(documents, "ConfigMap")}
    assert mounted == {"afl-worker": {"site.yaml": text}, "afl-server": {"server.yaml": text}}
