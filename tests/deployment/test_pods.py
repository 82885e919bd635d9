"""What the manifests say, run: each container's own command, configuration, user and read-only root."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployment_manifests import Document, Values, build, environment, example_values, the
from deployment_pods import Cluster
from safetensors.torch import load_file

from afl.config.source import read_yaml
from support import Process, Reference
from support.identities import Identities

WORKERS = 2

START_S = 300.0
"""A pod imports PyTorch from nothing, through a layer over the disk, beside others that do the same."""

pytestmark = pytest.mark.timeout(1200)

SERVER, WORKER = "afl-server", "afl-worker"

BY_CERT_MANAGER: Values = {"certManager": {"enabled": True}}

TRIED = """
import json, os, sys

def refusal(folder):
    try:
        open(folder + "/x", "w").close()
    except OSError as error:
        return error.strerror

rights = open("/proc/self/status").read().split("CapEff:")[1].split()[0]
line = {"event": "tried", "message": "", "user": os.getuid(), "groups": os.getgroups(), "rights": rights}
line.update((folder, refusal(folder)) for folder in ("/usr", "/etc/afl/config", "/var/lib/afl", "/tmp"))
print(json.dumps(line), file=sys.stderr)
"""


def small(example: str, changed: Values, rounds: int) -> list[Document]:
    """An example made small as a user would: by values."""
    text = example_values(example)["server"]["config"]
    for key, value in (("rounds", f"{rounds}"), ("every", "500"), ("directory", r"\g<value>\n  seed: 7")):
        text, count = re.subn(
            rf"^(?P<key>  {key}: )(?P<value>.*)$", rf"\g<key>{value}", text, flags=re.MULTILINE
        )
        assert count == 1, key
    server = {"workers": WORKERS, "run": "a-run", "config": text}
    return build(example, {"task": "synthetic", "server": server, **changed})


def by_hand(folder: Path) -> dict[str, dict[str, bytes]]:
    """The Secrets, made as docs/kubernetes.md says."""
    afl = str(Path(sys.executable).with_name("afl"))
    names = ["--server", SERVER, "--workers", str(WORKERS)]
    subprocess.run([afl, "certs", "certs", *names], cwd=folder, check=True, capture_output=True)
    files = {path.name: path.read_bytes() for path in (folder / "certs").iterdir()}
    return {
        "afl-server": {name: files[name] for name in ("server.pem", "server.key", "ca.pem")},
        "afl-worker": {name: files[name] for name in files if name.startswith("worker") or name == "ca.pem"},
    }


def by_cert_manager(documents: list[Document], folder: Path) -> dict[str, dict[str, bytes]]:
    """The Secrets that the rendered Certificates ask for."""
    ours = Identities(folder)
    server = the(documents, "Certificate", "afl-server")["spec"]
    workers = the(documents, "Certificate", "afl-worker")["spec"]
    (uri,) = workers["uris"]
    issued = {
        server["secretName"]: ours.issue_for_server(server["dnsNames"]),
        workers["secretName"]: ours.issue_for_worker(uri.removeprefix("afl:worker:")),
    }
    return {
        name: {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": ours.ca.read_bytes()}
        for name, pair in issued.items()
    }


def reference(documents: list[Document]) -> Reference:
    """What the run must come to."""
    config = the(documents, "ConfigMap", SERVER)["data"]["server.yaml"]
    (container,) = the(documents, "StatefulSet", SERVER)["spec"]["template"]["spec"]["containers"]
    values: Any = read_yaml(config, "server.yaml", environment(container, 0)).value
    assert values["algorithm"].pop("block") == "auto"
    return Reference.of(values)


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Asked for ten times a second."""
    tick = threading.Event()
    for _ in range(int(10 * START_S)):
        if holds():
            return
        tick.wait(0.1)
    raise AssertionError(f"not within {START_S:g} s: {what}")


def stop(cluster: Cluster, name: str, pod: Process, code: int) -> None:
    """As the kubelet does: SIGTERM, and no longer than terminationGracePeriodSeconds."""
    pod.terminate()
    pod.expect(code, cluster.grace(name))


def check_is_as_undisturbed(cluster: Cluster, documents: list[Document]) -> None:
    run = cluster.claim("state", SERVER) / "a-run"
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["result"] == "ok"
    model = load_file(run / "model-final.safetensors")["w"].numpy()
    assert model.tobytes() == reference(documents).weights[-1].tobytes()


@pytest.mark.parametrize(
    ("example", "changed"),
    [
        pytest.param("laptop", {}, marks=pytest.mark.long, id="laptop"),
        pytest.param("cluster", BY_CERT_MANAGER, marks=pytest.mark.slow, id="cluster, issued"),
    ],
)
def test_a_run_completes_with_the_containers_own_commands(
    tmp_path: Path, example: str, changed: Values
) -> None:
    documents = small(example, changed, rounds=12)
    secrets = by_cert_manager(documents, tmp_path / "issued") if changed else {}
    with Cluster(documents, tmp_path / "pods", secrets) as cluster:
        assert cluster.replicas == {SERVER: 1, WORKER: WORKERS}
        workers = [cluster.start(WORKER, ordinal) for ordinal in range(WORKERS)]
        workers[0].wait_for("reconnecting", timeout=START_S)
        for probe, status in (("startupProbe", 200), ("livenessProbe", 200), ("readinessProbe", 503)):
            assert cluster.probe(WORKER, 0, probe)[0] == status
        server = cluster.start(SERVER)
        for pod in (server, *workers):
            pod.wait_for("staying", timeout=START_S)

        for name in cluster.replicas:
            for probe in ("startupProbe", "livenessProbe"):
                assert cluster.probe(name, 0, probe) == (200, "ok")
            assert cluster.probe(name, 0, "readinessProbe") == (503, "the run is over")
        assert sorted(
            pod.wait_for("joined", timeout=START_S)["message"].partition(" of ")[0][-1] for pod in workers
        ) == [
            "0",
            "1",
        ]
        check_is_as_undisturbed(cluster, documents)

        stop(cluster, SERVER, server, 0)
        for pod in workers:
            stop(cluster, WORKER, pod, 0)
        again = cluster.start(SERVER)
        again.wait_for("staying", timeout=START_S)
        assert again.logged("run_complete"), "a pod that is started again leaves the run as it is"
        assert cluster.probe(SERVER, 0, "livenessProbe") == (200, "ok")
        assert cluster.probe(SERVER, 0, "readinessProbe") == (503, "the run is over")
        stop(cluster, SERVER, again, 0)


@pytest.mark.slow
def test_pods_that_are_rolled_during_a_run_change_no_bit(tmp_path: Path) -> None:
    documents = small("cluster", {}, rounds=800)
    with Cluster(documents, tmp_path / "pods", by_hand(tmp_path)) as cluster:

        def round_now() -> int:
            status, body = cluster.get(SERVER, 0, 9090, "/status")
            assert status == 200
            return int(json.loads(body)["round"])

        server = cluster.start(SERVER)
        workers = [cluster.start(WORKER, ordinal) for ordinal in range(WORKERS)]
        server.wait_for("listening", timeout=START_S)
        wait_until(lambda: round_now() >= 10, "round 10")
        for name in cluster.replicas:
            assert cluster.probe(name, 0, "readinessProbe") == (200, "ready")

        # Without one of them the run stands, so that it is in its midst when the others are stopped.
        stop(cluster, WORKER, workers[1], 130)
        stop(cluster, SERVER, server, 130)
        server = cluster.start(SERVER)
        server.wait_for("resumed", timeout=START_S)
        workers[0].wait_for("joined_again", timeout=START_S)
        workers[1] = cluster.start(WORKER, 1)
        workers[1].wait_for("journal_read", timeout=START_S)
        for pod in (server, *workers):
            pod.wait_for("staying", timeout=START_S)
        assert not server.logged("lost_residual")
        check_is_as_undisturbed(cluster, documents)


@pytest.mark.slow
def test_sites_with_releases_of_their_own_take_part_within_their_policies(tmp_path: Path) -> None:
    files = by_hand(tmp_path)
    secrets = {SERVER: files[SERVER]}
    documents = small("cluster", {"site": {"enabled": False}}, rounds=12)
    sites = [(f"{name}-{WORKER}", worker) for worker, name in enumerate(("north", "south"))]
    for name, worker in sites:
        policy = f"servers: [{SERVER}:50051]\ntasks: {{synthetic: any}}\naudit: /var/lib/afl/audit.jsonl\n"
        site = {"firstId": worker, "host": SERVER, "policy": policy, "data": {"enabled": False}}
        release = name.removesuffix(f"-{WORKER}")
        documents += build("site", {"task": "synthetic", "site": site}, release=release)
        kept = {"ca.pem", f"worker-{worker}.pem", f"worker-{worker}.key"}
        secrets[name] = {file: content for file, content in files[WORKER].items() if file in kept}
    with Cluster(documents, tmp_path / "pods", secrets) as cluster:
        assert cluster.replicas == {SERVER: 1, **{name: 1 for name, _ in sites}}
        pods = [cluster.start(SERVER), *(cluster.start(name, worker) for name, worker in sites)]
        for pod in pods:
            pod.wait_for("staying", timeout=START_S)
        check_is_as_undisturbed(cluster, documents)
        for name, worker in sites:
            assert (cluster.claim("journal", name, worker) / "audit.jsonl").stat().st_size > 0
            status, page = cluster.get(name, worker, 9091, "/metrics")
            assert status == 200
            assert "afl_site_" in page


def test_a_root_that_is_read_only_and_a_user_without_rights(tmp_path: Path) -> None:
    """That the emulation is one: what it forbids is forbidden."""
    documents = small("laptop", {}, rounds=12)
    container = the(documents, "StatefulSet", SERVER)["spec"]["template"]["spec"]["containers"][0]
    container["command"], container["args"] = ["python", "-c", TRIED], []
    with Cluster(documents, tmp_path / "pods") as cluster:
        line = cluster.start(SERVER).wait_for("tried", timeout=START_S)
    assert (line["user"], line["groups"], int(line["rights"], 16)) == (10001, [10001], 0)
    read_only = "Read-only file system"
    assert (line["/usr"], line["/etc/afl/config"]) == (read_only, read_only)
    assert (line["/var/lib/afl"], line["/tmp"]) == (None, None)
