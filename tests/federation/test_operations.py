"""What an operator sees and does: probes, metrics, restarts, signals, and networks that misbehave."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from afl.errors import ExitCode
from afl.v1 import federation_pb2 as pb
from afl_cli.main import main
from afl_server.pages.metrics import FAMILIES
from support import Federation, Process, Proxy, RawClient, Reference
from support.commands import daemon_without_rights
from support.federation import completed, fetch

SYNTHETIC: dict[str, Any] = {
    "workers": 2,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {
        "name": "afl-com",
        "rounds": 20,
        "eta_w": 0.9,
        "eta_q": 0.3,
        "uplink": {"name": "rand-k", "ratio": 0.1},
    },
}
SLOW = {**SYNTHETIC, "task": {"name": "tests_tasks:Slow", "batch_size": 8, "options": {"pause": 0.02}}}
SLOW_TASK = ("--task", "tests_tasks:Slow")


def with_rounds(config: dict[str, Any], rounds: int, **server: Any) -> dict[str, Any]:
    return {**config, "algorithm": {**config["algorithm"], "rounds": rounds}, "server": server}


def is_as_the_reference_says(federation: Federation, config: dict[str, Any]) -> bool:
    weights = federation.model("final")["w"].numpy()
    return weights.tobytes() == Reference.of(config).weights[-1].tobytes()


# One long run, looked at, then taken down: these tests use it in this order.


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Ten thousand rounds of a small network with the residuals of Top-k."""
    config: dict[str, Any] = {
        "workers": 2,
        "task": {"name": "digits", "batch_size": 16, "options": {"hidden": [8]}},
        "algorithm": {
            "name": "afl-com",
            "rounds": 10_000,
            "eta_w": 0.05,
            "eta_q": 0.01,
            "uplink": {"name": "top-k", "ratio": 0.1},
        },
        "evaluation": {"every": 5},
    }
    with Federation(config, tmp_path_factory.mktemp("digits")) as federation:
        federation.start("0-1")
        federation.wait_until(lambda status: status["best"] is not None)
        yield federation


def test_probes(digits: Federation) -> None:
    assert digits.get("/healthz") == "ok\n"
    assert digits.get("/readyz") == "ready\n"
    with pytest.raises(urllib.error.HTTPError) as missing:
        digits.get("/nowhere")
    with missing.value as answer:
        assert answer.code == 404
        assert "/status" in answer.read().decode()


def test_every_documented_metric_is_there(digits: Federation) -> None:
    page = digits.get("/metrics")
    samples = digits.metrics()
    kinds = ("", "page_", "worker_")
    of_certificates = {f"afl_{kind}certificate_expiry_seconds" for kind in kinds}
    assert not [name for name in samples if name.partition("{")[0] in of_certificates], "there are none here"
    of_integers = {name for name in FAMILIES if name.startswith(("afl_integer_", "afl_grid_"))}
    assert not [name for name in samples if name.partition("{")[0] in of_integers], "values are float32"
    of_hidden, of_names, of_records = {"afl_smooth_worst_loss"}, {"afl_site_info"}, {"afl_worker_epsilon"}
    for name, family in FAMILIES.items():
        if name in of_certificates | of_integers | of_hidden | of_names | of_records:
            continue
        described = [line for line in page.splitlines() if line.startswith(f"# HELP {name}")]
        assert described, name
        assert any(family.meaning in line for line in described), name
        assert any(sample.partition("{")[0] == name for sample in samples), name
    assert samples["afl_workers"] == 2
    assert samples["afl_workers_ready"] == 2
    assert samples["afl_rounds"] == 10_000
    weights = [samples[f'afl_dual_weight{{worker="{worker}"}}'] for worker in range(2)]
    assert sum(weights) == pytest.approx(1)


def test_status(digits: Federation) -> None:
    first = digits.status()
    later = digits.wait_until(lambda status: status["round"] > first["round"] + 20)
    assert first["state"] == later["state"] == "running"
    assert first["run_id"] == later["run_id"] == digits.server.logged("listening")[0]["run_id"]
    assert later["workers_missing"] == []
    assert later["uplink_bytes"] > first["uplink_bytes"]
    assert later["best"]["worst_accuracy"] >= first["best"]["worst_accuracy"]
    assert sum(later["dual_weights"]) == pytest.approx(1)
    assert later["seconds_left"] > 0


@pytest.mark.parametrize("service", ["", "afl.v1.Federation"])
def test_the_standard_health_service(digits: Federation, service: str) -> None:
    with grpc.insecure_channel(digits.address, [("grpc.enable_http_proxy", 0)]) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=30
        )
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_worker_that_is_terminated_says_goodbye(digits: Federation) -> None:
    worker = digits.workers[0]
    worker.terminate()
    worker.expect(ExitCode.INTERRUPTED)
    line = digits.server.wait_for("goodbye")
    assert "workers 0-1" in line["message"]
    assert "stopped by SIGTERM" in line["message"]
    digits.server.wait_for("session_ended")
    status = digits.wait_until(lambda status: min(status["workers_missing_seconds"], default=0) > 0)
    assert status["workers_missing"] == [0, 1]


def test_another_takes_its_place(digits: Federation) -> None:
    stopped_at = digits.status()["round"]
    digits.start("0-1", "--journal", "another-disk")
    digits.server.wait_for("lost_residual", worker=1)
    digits.wait_until(lambda status: status["round"] > stopped_at + 3)
    assert digits.metrics()["afl_lost_residuals_total"] == 2


def test_a_directory_holds_one_run(digits: Federation) -> None:
    second = Process(
        "second server",
        ["-m", "afl_server", "--config", "server.yaml"],
        folder=digits.folder,
    )
    try:
        second.expect(ExitCode.IN_USE)
        assert f"the run in {digits.directory} is in use by another process" in second.text
        assert "Traceback" not in second.text
    finally:
        second.close()


def test_a_server_that_is_terminated_saves_and_tells_its_workers(digits: Federation) -> None:
    digits.server.terminate()
    digits.server.expect(ExitCode.INTERRUPTED)
    lost = digits.workers[-1].wait_for("reconnecting")
    assert "stopped by SIGTERM" in lost["message"], "it waits for the server to come back"
    summary = digits.summary()
    assert summary["result"] == "interrupted"
    assert 0 < summary["rounds"] < 10_000
    assert digits.model_metadata("final")["rounds_applied"] == str(summary["rounds"])
    assert all(np.isfinite(tensor.numpy()).all() for tensor in digits.model("final").values())
    assert [line["round"] for line in digits.records("round")] == list(range(1, summary["rounds"] + 1))


# Coming early, coming late, being left alone.


def test_a_worker_before_its_server_and_a_server_that_dies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_rounds(SLOW, 5_000)
    with Proxy() as nobody:
        closed = nobody.port
    with Proxy(closed) as proxy, Federation(config, tmp_path / "run") as federation:
        options = (*SLOW_TASK, "--give-up-after", "3s")
        arguments = ["-m", "afl_worker", "--id", "0-1", "--server", proxy.address, *SLOW_TASK]
        worker = Process("early worker", arguments, folder=tmp_path)
        federation.workers.append(worker)
        worker.wait_for("reconnecting", count=2)
        assert federation.port
        status = federation.status()
        assert status["workers_missing"] == [0, 1]
        assert status["workers_missing_seconds"] == [None, None]
        proxy.aim(federation.port)
        worker.wait_for("joined")
        federation.wait_until(lambda status: status["round"] >= 2)
        status = federation.status()
        expected = Reference.of(config, stop_after=status["open_round"]).dual_weights
        assert status["dual_weights"] == pytest.approx(
            expected[status["open_round"] - 1].tolist(), rel=0, abs=1e-12
        )
        worker.kill()
        federation.server.wait_for("session_ended")

        left_alone = federation.start("0-1", *options)
        left_alone.wait_for("joined")
        federation.server.kill()
        left_alone.expect(ExitCode.LOST_SERVER)
        assert f"no session with the server at 127.0.0.1:{federation.port} for" in left_alone.text
        assert "(--give-up-after 3" in left_alone.text
        assert main(["inspect", str(federation.directory)]) == 0
        shown = capsys.readouterr().out
        assert "UNFINISHED" in shown
        last = federation.records("round")[-1]["round"]
        assert last >= status["round"]
        assert f"{last} is the last that metrics.jsonl has" in shown


def test_a_worker_after_the_end(tmp_path: Path) -> None:
    """The server waits a while for a session that does not read its goodbye; who comes then is told."""
    dim = 300_000
    config: dict[str, Any] = {
        "workers": 1,
        "task": {"name": "synthetic", "batch_size": 2, "options": {"dim": dim, "examples": 2}},
        "algorithm": {"name": "afl-br", "rounds": 1, "eta_w": 0.1, "eta_q": 0.1},
    }
    with Federation(config, tmp_path / "run") as federation:
        with Proxy() as door:
            # It is through with its imports by the time it is let in.
            late = federation.start("0", server=door.address)
            with RawClient(federation.port, answers=True, grpc__http2__bdp_probe=0) as client:
                client.handshake([0])
                client.takes.clear()
                payload = pb.Payload(
                    role="ROLE_UPDATE",
                    encoding="ENCODING_DENSE",
                    value_type="VALUE_TYPE_FLOAT32",
                    dim=dim,
                    count=dim,
                    value_bytes=4 * dim,
                )
                report = pb.Report(position=pb.Position(round=1), loss=1, examples=2, payloads=[payload])
                client.send(reports=[report])
                for offset in (0, 2 * dim):
                    client.send(chunks=[pb.Chunk(offset=offset, data=bytes(2 * dim))])
                federation.wait_until(lambda status: status["step"] == "evaluation")
                evaluation = pb.Report(
                    position=pb.Position(round=1, phase=255),
                    loss=1,
                    examples=2,
                    metrics=[pb.Metric(name="loss", value=1)],
                )
                client.send(reports=[evaluation])
                federation.wait_until(lambda status: status["state"] == "over")
                with pytest.raises(urllib.error.HTTPError) as not_ready:
                    federation.get("/readyz")
                with not_ready.value as answer:
                    assert answer.code == 503
                door.aim(federation.port)
                late.expect(ExitCode.OK)
                assert "the run is complete" in late.text
        federation.server.expect(ExitCode.OK)


def test_a_server_does_not_wait_for_ever(tmp_path: Path) -> None:
    with Federation(with_rounds(SYNTHETIC, 5, start_timeout="1s"), tmp_path / "run") as federation:
        federation.server.expect(ExitCode.ABORTED)
        assert "workers 0-1 did not join within server.start_timeout (1s)" in federation.server.text
    assert federation.summary()["rounds"] == 0
    assert not (federation.directory / "model-final.safetensors").exists(), "nobody has trained it"


def test_a_run_directory_that_goes_away_ends_the_run_and_says_so(tmp_path: Path) -> None:
    """Within seconds, whether or not a model is due."""
    with Federation(with_rounds(SLOW, 100_000), tmp_path / "run") as federation:
        worker = federation.start("0-1", *SLOW_TASK)
        federation.wait_until(lambda status: status["round"] >= 1)
        shutil.rmtree(federation.directory)
        federation.server.expect(ExitCode.STORAGE)
        worker.expect(ExitCode.ABORTED)
        (end,) = federation.server.logged("run_over")
        assert end["message"] == (
            f"the run directory {federation.directory} is gone; restore it from a backup, or begin "
            "again in another one"
        )
        assert end["code"] == ExitCode.STORAGE
        assert f"the run was stopped: {end['message']}" in worker.text
        assert "Traceback" not in federation.server.text + worker.text
        assert not federation.directory.exists()


def test_a_run_directory_that_is_closed_to_the_server_ends_the_run_and_says_so(tmp_path: Path) -> None:
    above = tmp_path / "above"
    config = completed(with_rounds(SYNTHETIC, 5), above / "run")
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    server = Process("server", daemon_without_rights("--config", "server.yaml"), folder=tmp_path)
    try:
        server.wait_for("listening")
        above.chmod(0)
        server.expect(ExitCode.STORAGE)
        (end,) = server.logged("run_over")
        assert end["message"] == (
            f"the run directory cannot be looked into any more: {above / 'run'}: Permission denied; this "
            "process may not look or write there; name another path, or run it as a user who may"
        )
    finally:
        above.chmod(0o700)
        server.close()


def test_a_run_that_is_read_only_is_not_resumed_elsewhere(tmp_path: Path) -> None:
    config = completed(with_rounds(SYNTHETIC, 5, give_up_after="1s"), tmp_path / "run")
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = ["-m", "afl_server", "--config", "server.yaml"]
    with contextlib.closing(Process("server", command, folder=tmp_path)) as server:
        server.expect(ExitCode.LOST_WORKERS)
    state = tmp_path / "run" / "state"
    (state / "lock").chmod(0o400)
    state.chmod(0o500)
    command = daemon_without_rights("--resume", str(tmp_path / "run"))
    with contextlib.closing(Process("server", command, folder=tmp_path)) as server:
        server.expect(ExitCode.STORAGE)
        assert f"{state} cannot be written: Permission denied; make it writable, and start" in server.text


def test_what_takes_the_place_of_a_run_directory_is_left_alone(tmp_path: Path) -> None:
    with Federation(with_rounds(SLOW, 100_000), tmp_path) as federation:
        worker = federation.start("0-1", *SLOW_TASK)
        federation.wait_until(lambda status: status["round"] >= 1)
        federation.directory.rename(tmp_path / "moved")
        federation.directory.mkdir()
        (federation.directory / "metrics.jsonl").write_text("another run's\n")
        federation.server.expect(ExitCode.STORAGE)
        worker.expect(ExitCode.ABORTED)
    assert [path.name for path in federation.directory.iterdir()] == ["metrics.jsonl"]
    assert (federation.directory / "metrics.jsonl").read_text() == "another run's\n"


@pytest.mark.parametrize(
    ("state", "rounds", "dim", "lost"),
    [
        ("off", 200, 100, "metrics.jsonl"),
        ("off", 20, 10_000, "model-"),
        ("process", 200, 100, "state/log-"),
    ],
)
def test_a_disk_that_takes_no_more_ends_the_run_and_says_so(
    tmp_path: Path, state: str, rounds: int, dim: int, lost: str
) -> None:
    """A limit on the size of files, 16 KiB, stands for a full disk."""
    program = (
        "import resource, runpy, sys\n"
        "from afl_server.storage.records import RunRecords\n"
        "create = RunRecords.create\n"
        "def limited(*arguments):\n"
        "    records = create(*arguments)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))\n"
        "    return records\n"
        "RunRecords.create = limited\n"
        "runpy.run_module('afl_server', run_name='__main__')\n"
    )
    config = with_rounds(SYNTHETIC, rounds)
    config["task"] = {**config["task"], "options": {"dim": dim}}
    config["server"] = {**config.get("server", {}), "state": state}
    folder, directory = tmp_path, tmp_path / "run"
    (folder / "server.yaml").write_text(yaml.safe_dump(completed(config, directory)))
    server = Process("server", ["-c", program, "--config", "server.yaml"], folder=folder)
    worker: Process | None = None
    try:
        address = f"127.0.0.1:{server.wait_for('listening')['port']}"
        worker = Process("worker", ["-m", "afl_worker", "--id", "0-1", "--server", address], folder=folder)
        server.expect(ExitCode.STORAGE)
        (end,) = server.logged("run_over")
        assert end["message"].startswith(str(directory / lost))
        assert " cannot be written: " in end["message"]
        assert "Traceback" not in server.text
        if state == "off":
            worker.expect(ExitCode.ABORTED)
            return
        # There is room again: the worker has waited for it.
        worker.wait_for("reconnecting")
        server.wait_for("can_go_on")
        server.close()
        listen = f"server.listen={address}"
        server = Process(
            "server", ["-m", "afl_server", "--config", "server.yaml", "--set", listen], folder=folder
        )
        server.expect(ExitCode.OK)
        worker.expect(ExitCode.OK)
    finally:
        server.close()
        if worker is not None:
            worker.close()


@pytest.mark.long
def test_a_stopped_process_loses_its_worker_to_one_that_answers(tmp_path: Path) -> None:
    """The second goes on without the first's residual; the first is refused once it goes on."""
    with Federation(with_rounds(SLOW, 100_000), tmp_path / "run") as federation:
        first = federation.start("0-1", *SLOW_TASK)
        federation.wait_until(lambda status: status["round"] >= 1)
        first.send_signal(signal.SIGSTOP)
        second = federation.start("0-1", *SLOW_TASK, "--journal", "another-disk")
        federation.server.wait_for("replaced")
        federation.server.wait_for("lost_residual", worker=0)
        federation.server.wait_for("lost_residual", worker=1)
        round_ = federation.status()["round"]
        federation.wait_until(lambda status: status["round"] > round_)
        first.send_signal(signal.SIGCONT)
        first.expect(ExitCode.REFUSED)
        assert "worker 0 is taken: another process" in first.text
        assert len(first.logged("reconnecting")) == 1
        assert second.is_running
        assert federation.server.is_running


@pytest.mark.long
def test_a_stopped_process_goes_on_where_residuals_must_not_be_lost(tmp_path: Path) -> None:
    config = {**with_rounds(SLOW, 30), "faults": {"lost_residual": "refuse"}}
    with Federation(config, tmp_path / "run") as federation:
        first = federation.start("0-1", *SLOW_TASK)
        federation.wait_until(lambda status: status["round"] >= 1)
        first.send_signal(signal.SIGSTOP)
        second = federation.start("0-1", *SLOW_TASK, "--journal", "another-disk")
        second.expect(ExitCode.REFUSED)
        assert "worker 0 comes back without its uplink residual" in second.text
        federation.server.wait_for("replaced")
        first.send_signal(signal.SIGCONT)
        first.wait_for("joined_again")
        federation.finish()
    assert is_as_the_reference_says(federation, config)


def test_a_server_that_is_stopped_does_not_wait_for_a_worker_that_goes_meanwhile(tmp_path: Path) -> None:
    config = with_rounds(SLOW, 10_000, grace="1h")
    config["task"] = {**config["task"], "options": {"pause": 3600.0}}
    with Federation(config, tmp_path / "run") as federation:
        worker = federation.start("0-1", *SLOW_TASK)
        federation.server.wait_for("worker_ready")
        federation.server.terminate()
        federation.server.wait_for("stopping")
        worker.terminate()
        federation.server.expect(ExitCode.INTERRUPTED)
        worker.expect(ExitCode.INTERRUPTED)
        federation.server.wait_for("can_go_on")


def test_a_second_signal_ends_the_server_at_once(tmp_path: Path) -> None:
    with Federation(with_rounds(SLOW, 10_000), tmp_path / "run") as federation:
        proxy = Proxy(federation.port)
        with proxy:
            federation.start("0-1", *SLOW_TASK, server=proxy.address)
            federation.wait_until(lambda status: status["round"] >= 1)
            proxy.stall()
            federation.server.send_signal(signal.SIGTERM)
            federation.server.wait_for("stopping")
            federation.server.send_signal(signal.SIGTERM)
            assert federation.server.wait(timeout=5.0) == -signal.SIGTERM


# Networks.


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_ipv6_and_a_dead_proxy(tmp_path: Path) -> None:
    with Proxy() as nobody:
        dead = f"http://127.0.0.1:{nobody.port}"
    environment = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), dead)
    config = with_rounds(SYNTHETIC, 20, listen="[::1]:0", http="[::1]:0")
    with Federation(config, tmp_path / "run", environment=environment) as federation:
        http_port = federation.server.wait_for("listening")["http_port"]
        assert fetch(f"http://[::1]:{http_port}/healthz") == "ok\n"
        assert json.loads(fetch(f"http://[::1]:{http_port}/status"))["state"] == "waiting for workers"
        federation.start("0-1", server=f"[::1]:{federation.port}")
        federation.finish()
    assert is_as_the_reference_says(federation, config)


@pytest.mark.long
def test_long_steps_are_not_silence_and_a_silent_peer_is_not_long(tmp_path: Path) -> None:
    """Each step takes twice the peer timeout; then a line goes dead without a word."""
    rounds = 2
    config = with_rounds(SLOW, rounds, heartbeat="500ms", peer_timeout="2s")
    config["task"] = {**config["task"], "options": {"pause": 4.0}}
    with Proxy() as proxy, Federation(config, tmp_path / "run") as federation:
        federation.start("0", *SLOW_TASK)
        distant = federation.start("1", *SLOW_TASK, server=proxy.address)
        proxy.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 1)
        assert not federation.server.logged("peer_timeout")
        proxy.stall()
        federation.server.wait_for("peer_timeout")
        distant.wait_for("reconnecting")
        proxy.resume()
        federation.finish()
        assert federation.server.logged("worker_ready", workers="[1]")
        (again,) = distant.logged("joined_again")
        assert again["message"] == f"joined again: run {again['run_id']}, round {again['round']}"
        assert again["round"] == 2
        assert len(federation.server.logged("peer_timeout")) == 1
    reference = Reference.of(config)
    assert len(reference.losses) == rounds
    assert federation.model("final")["w"].numpy().tobytes() == reference.weights[-1].tobytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_when_all_is_done_changes_no_exit_code(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Federation(SYNTHETIC, tmp_path) as federation:
        federation.start("0-1")
        federation.server.wait_for("run_over")
        while federation.server.is_running:
            # It may have ended since it was asked whether it runs.
            with contextlib.suppress(ProcessLookupError):
                federation.server.send_signal(number)
            time.sleep(0.005)
        federation.server.expect(0)
