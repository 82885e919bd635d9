"""The server is killed or stopped at any time and started again: the result is the same to the bit."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import yaml
from faults_cases import ALGORITHMS, GROUPS, TASK, config_of

from afl.daemon.fault_points import VARIABLE
from afl.runs.durable import next_record
from support import Federation, Process, Proxy, result_of, run_together
from support.federation import completed
from support.longer import but_long


@pytest.mark.parametrize("algorithm", ["top-k", pytest.param("drfa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("state", [pytest.param("process", marks=pytest.mark.slow), "machine"])
def test_a_server_that_is_killed_again_and_again_goes_on(tmp_path: Path, undisturbed, algorithm, state):
    with Proxy() as door, Federation(config_of(algorithm, state=state), tmp_path) as federation:
        for ids in GROUPS:
            federation.start(ids, "--task", TASK, server=door.address)
        door.aim(federation.port)
        rounds = ALGORITHMS[algorithm]["rounds"]
        for due in (0.2, 0.45, 0.8):
            federation.wait_until(lambda status, due=due: status["round"] >= due * rounds)
            federation.server.kill()
            federation.start_server()
            door.aim(federation.port)
        federation.finish()
        for server in federation.servers[1:]:
            assert server.logged("resumed"), server.text
        assert (
            len({line["run_id"] for server in federation.servers for line in server.logged("listening")}) == 1
        )
    assert result_of(federation) == undisturbed(algorithm)


@pytest.mark.parametrize(
    ("number", "damage"), [(signal.SIGTERM, "[]"), pytest.param(signal.SIGINT, "{", marks=pytest.mark.slow)]
)
def test_a_server_that_is_stopped_finishes_its_round_and_goes_on(tmp_path: Path, undisturbed, number, damage):
    """Whatever has become of its summary and its versions meanwhile."""
    with Proxy() as door, Federation(config_of("top-k"), tmp_path) as federation:
        for ids in GROUPS:
            federation.start(ids, "--task", TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 15)
        federation.server.send_signal(number)
        federation.server.expect(130)
        assert federation.summary()["result"] == "interrupted"
        assert f"afl-server --resume {federation.directory}" in federation.server.text
        (federation.directory / "summary.json").write_text(damage)
        versions = federation.directory / "versions.json"
        versions.unlink()
        os.mkfifo(versions)
        federation.start_server()
        door.aim(federation.port)
        federation.finish()
        assert federation.server.logged("summary_damaged")
        assert federation.server.logged("versions_damaged")
        assert versions.is_fifo()
    assert result_of(federation) == undisturbed("top-k")


@pytest.mark.parametrize(
    "written", but_long(["config.yaml", "metrics.jsonl", "lock"], "config.yaml", "metrics.jsonl")
)
def test_a_server_that_dies_before_its_run_begins_leaves_the_directory_free(tmp_path: Path, written: str):
    """Whichever of the run's files is the last that it made."""
    program = (
        "import os, runpy, sys, threading, time\n"
        "def look():\n"
        f"    while not any(name == {written!r} for *_, names in os.walk('run') for name in names):\n"
        "        pass\n"
        "    os.kill(os.getpid(), 9)\n"
        "from afl_server.storage import records, store\n"
        "pause = lambda path, data, whole=records.write_whole: (whole(path, data), time.sleep(2))\n"
        "records.write_whole = pause\n"
        "threading.Thread(target=look, daemon=True).start()\n"
        "runpy.run_module('afl_server', run_name='__main__')\n"
    )
    config = config_of("top-k")
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(completed(config, tmp_path / "run")))
    dying = Process("dying", ["-c", program, "--config", "server.yaml"], folder=tmp_path)
    try:
        dying.expect(-signal.SIGKILL)
    finally:
        dying.close()
    with Federation(config, tmp_path) as federation:
        assert federation.server.wait_for("listening")


@pytest.mark.long
def test_a_server_that_is_stopped_as_an_evaluation_closes_keeps_its_best_model(tmp_path: Path, undisturbed):
    """The eighth step is the first evaluation, and the best so far: it is written before the server goes."""
    held_up = {VARIABLE: "server.before-log:8:delay=3"}
    with Proxy() as door, Federation(config_of("top-k"), tmp_path, environment=held_up) as federation:
        for ids in GROUPS:
            federation.start(ids, "--task", TASK, server=door.address)
        door.aim(federation.port)
        metrics = federation.directory / "metrics.jsonl"
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 7):
            time.sleep(0.02)
        federation.server.terminate()
        federation.server.expect(130)
        assert [line["round"] for line in federation.records("evaluation")] == [7]
        assert federation.model_metadata("best")["rounds_applied"] == "7"
        federation.start_server(environment={VARIABLE: ""})
        door.aim(federation.port)
        federation.finish()
    assert result_of(federation) == undisturbed("top-k")


def test_a_run_goes_on_elsewhere_with_its_own_configuration(tmp_path: Path, undisturbed):
    with Proxy() as door, Federation(config_of("top-k"), tmp_path / "here") as federation:
        for ids in GROUPS:
            federation.start(ids, "--task", TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 12)
        federation.server.kill()
        moved = tmp_path / "elsewhere"
        federation.directory.rename(moved)
        federation.directory = moved
        (federation.folder / "server.yaml").unlink()
        federation.start_resumed(moved)
        door.aim(federation.port)
        federation.finish()
    assert result_of(federation) == undisturbed("top-k")


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path):
    with Federation(config_of("top-k"), tmp_path) as federation:
        federation.server.wait_for("listening")
        federation.server.kill()
        server = federation.start_server("--set", "algorithm.eta_w=0.25", "--set", "server.grace=3s")
        server.expect(2)
        assert "algorithm.eta_w: the run's is 0.5, given is 0.25" in server.text
        assert "grace" not in server.text


def test_a_configuration_that_was_edited_in_the_run_directory_is_refused_by_name(tmp_path: Path, undisturbed):
    with Proxy() as door, Federation(config_of("top-k"), tmp_path) as federation:
        for ids in GROUPS:
            federation.start(ids, "--task", TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 12)
        federation.server.kill()
        file = federation.directory / "config.yaml"
        own = file.read_text()
        assert "eta_w: 0.5" in own
        assert "grace: 10s" in own
        file.write_text(own.replace("eta_w: 0.5", "eta_w: 0.25"))
        edited = federation.start_resumed(federation.directory)
        edited.expect(2)
        assert f"{file} is not as it was when the run was begun" in edited.text
        assert "algorithm.eta_w: the run's is 0.5, given is 0.25" in edited.text
        # What only the server does may be edited.
        file.write_text(own.replace("grace: 10s", "grace: 3s"))
        federation.start_resumed(federation.directory)
        door.aim(federation.port)
        federation.finish()
        assert "grace: 3s" in file.read_text()
    assert result_of(federation) == undisturbed("top-k")


def test_a_runs_own_configuration_is_written_again_where_the_file_was_edited(tmp_path: Path):
    with Federation(config_of("top-k"), tmp_path) as federation:
        federation.server.wait_for("listening")
        federation.server.kill()
        file = federation.directory / "config.yaml"
        own = file.read_text()
        file.write_text(own.replace("eta_w: 0.5", "eta_w: 0.25"))
        federation.start_server().wait_for("resumed")
        assert file.read_text() == own


@pytest.mark.parametrize("damage", but_long(["flipped", "cut", "gone"], "flipped", "cut"))
def test_rounds_that_are_lost_are_counted_and_the_run_goes_on(tmp_path: Path, damage: str):
    with Proxy() as door, Federation(config_of("top-k", checkpoint_every=1000), tmp_path) as federation:
        closed, log = killed_after(15, federation, door)
        content = bytearray(log.read_bytes())
        starts = starts_of(content)
        middle = starts[len(starts) // 2]
        if damage == "flipped":
            content[middle + 40] ^= 1
            log.write_bytes(content)
        elif damage == "cut":
            log.write_bytes(content[:middle])
        else:
            log.unlink()
        server = federation.start_server()
        door.aim(federation.port)
        federation.finish()
        (lost,) = server.logged("rounds_lost")
        (resumed,) = server.logged("resumed")
        assert lost["rounds"] == closed - (resumed["round"] - 1) > 0
        assert not server.logged("log_cut")
        kept = log.with_name(log.name + ".damaged")
        if damage == "flipped":
            assert kept.read_bytes() == content[middle:]
        else:
            assert not kept.exists()
    assert [line["round"] for line in federation.records("round")] == list(range(1, 41))


def test_a_server_that_is_killed_while_it_finds_rounds_lost_finds_them_again(tmp_path: Path):
    with Proxy() as door, Federation(config_of("top-k", checkpoint_every=1000), tmp_path) as federation:
        closed, log = killed_after(10, federation, door)
        content = log.read_bytes()
        log.write_bytes(content[: starts_of(content)[4]])
        federation.start_server(environment={VARIABLE: "server.mid-replay:2:kill"}).expect(-signal.SIGKILL)
        server = federation.start_server()
        resumed = server.wait_for("resumed")
        (lost,) = server.logged("rounds_lost")
        assert lost["rounds"] == closed - (resumed["round"] - 1) > 0


def killed_after(rounds: int, federation: Federation, door: Proxy) -> tuple[int, Path]:
    """Kill the server of a run after some rounds: the rounds that are closed, and the newest log of them."""
    for ids in GROUPS:
        federation.start(ids, "--task", TASK, server=door.address)
    door.aim(federation.port)
    federation.wait_until(lambda status: status["round"] >= rounds)
    federation.server.kill()
    closed: int = federation.records("round")[-1]["synchronization"]
    return closed, max((federation.directory / "state").glob("log-*"))


def starts_of(log: bytes | bytearray) -> list[int]:
    """Where the whole outcomes of a log begin."""
    content, starts, position = memoryview(bytes(log)), [], 0
    while (found := next_record(content, position)) is not None:
        starts.append(found[0])
        position = found[0] + found[1].length
    return starts


def test_two_servers_cannot_run_one_run(tmp_path: Path):
    with Federation(config_of("top-k"), tmp_path) as federation:
        federation.server.wait_for("listening")
        second = federation.start_server()
        second.expect(11)
        assert "in use by another process" in second.text


def test_a_run_that_is_complete_is_not_begun_again(tmp_path: Path):
    federation = run_together(config_of("top-k"), tmp_path, GROUPS)
    before = json.dumps(federation.summary())
    with federation:
        federation.server.expect(0)
        assert "already holds this run, which is complete; to see it: afl inspect " in federation.server.text
        assert "name another directory: --set run.directory=runs/NEW" in federation.server.text
    assert json.dumps(federation.summary()) == before


def test_a_damaged_checkpoint_costs_nothing(tmp_path: Path, undisturbed):
    with Proxy() as door, Federation(config_of("top-k"), tmp_path) as federation:
        for ids in GROUPS:
            federation.start(ids, "--task", TASK, server=door.address)
        door.aim(federation.port)
        federation.wait_until(lambda status: status["round"] >= 25)
        federation.server.kill()
        newest = max((federation.directory / "state").glob("checkpoint-*[0-9]"))
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
        federation.start_server()
        door.aim(federation.port)
        federation.finish()
        assert federation.server.logged("checkpoint_damaged")
        assert not federation.server.logged("rounds_lost")
    assert result_of(federation) == undisturbed("top-k")
