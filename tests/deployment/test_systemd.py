"""The units of deploy/systemd: systemd takes them, and what they start is a federation."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from afl.config import load_config
from afl.config.quantities import Duration
from afl.errors import ExitCode
from support import Process
from support.federation import completed
from support.identities import Identities, tls

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
NAMES = ("afl-server.service", "afl-worker@.service")
PROGRAMS = {"/opt/afl/bin/afl-server": "afl_server", "/opt/afl/bin/afl-worker": "afl_worker"}

CONFIG = {
    "workers": 3,
    "task": {"name": "synthetic", "batch_size": 8},
    "algorithm": {"name": "afl-br", "rounds": 30, "eta_w": 0.5, "eta_q": 0.2},
    "evaluation": {"every": 10},
}


def unit(name: str) -> dict[str, str]:
    """The settings of a unit; none is written twice, but for files of variables, of which the last counts."""
    settings: dict[str, str] = {}
    for line in (UNITS / name).read_text(encoding="utf-8").splitlines():
        if re.match(r"[A-Za-z]+=", line):
            key, _, value = line.partition("=")
            several = settings.get(key, "") + " " if key == "EnvironmentFile" else ""
            assert several or key not in settings, f"{name} has two lines for {key}"
            settings[key] = several.lstrip() + value
    return settings


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not on this machine")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", [["verify", "--man=no"], ["security", "--offline=true", "--threshold=20"]])
def test_systemd_takes_the_unit(name: str, check: list[str], tmp_path: Path) -> None:
    """It wants the program to exist, and knows every setting; it rates what a break-in would reach, from
    0 to 10, at most 2."""
    text = re.sub(r"/opt/afl/bin/\S+", sys.executable, (UNITS / name).read_text(encoding="utf-8"))
    copy = tmp_path / name.replace("@", "@3")
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", *check, str(copy)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if copy.name in line or str(copy) in line]
    assert done.returncode == 0, done.stderr
    assert not said, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_only_what_would_come_again_is_not_tried_again(name: str) -> None:
    """As docs/operations.md says: every exit code but these."""
    settings = unit(name)
    again = (ExitCode.CONFIG, ExitCode.REFUSED, ExitCode.DIVERGED, ExitCode.DATA, ExitCode.POLICY)
    assert settings["RestartPreventExitStatus"].split() == [str(int(code)) for code in sorted(again)]
    assert settings["SuccessExitStatus"] == str(int(ExitCode.INTERRUPTED))
    assert settings["StartLimitIntervalSec"] == "0"


@pytest.mark.parametrize("name", NAMES)
def test_a_daemon_has_longer_than_its_own_grace(name: str) -> None:
    grace = load_config(ROOT / "deploy" / "server.yaml").server.grace
    assert Duration(f"{unit(name)['TimeoutStopSec']}s") > grace


def test_what_the_units_start_is_a_federation_under_mutual_tls(tmp_path: Path) -> None:
    """Each unit's own command, with the machine's folders moved below a temporary one."""
    etc, var = tmp_path / "etc/afl", tmp_path / "var/lib/afl"
    var.mkdir(parents=True)
    identities = Identities(etc)
    server = identities.server()
    for worker in range(3):
        identities.worker(str(worker))
    config = completed({**CONFIG, "server": {"tls": tls(server, identities.ca)}}, Path("runs/first"))
    (etc / "site.yaml").write_text(f"audit: {var}/audit.jsonl\n", encoding="utf-8")
    (etc / "server.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    processes: list[Process] = []

    def start(name: str, instance: str = "", options: str = "", **variables: str) -> Process:
        # Systemd splits the value of an unquoted variable into words.
        command = unit(name)["ExecStart"].replace("%i", instance).replace("$AFL_OPTIONS", options)
        for key, value in variables.items():
            command = command.replace(f"${{{key}}}", value)
        assert "$" not in command
        assert "%" not in command
        program, *arguments = shlex.split(command)
        moved = [re.sub(r"^/(etc|var)/", rf"{tmp_path}/\1/", argument) for argument in arguments]
        processes.append(Process(f"{name} {instance}", ["-m", PROGRAMS[program], *moved], folder=var))
        return processes[-1]

    try:
        first = start("afl-server.service")
        port = first.wait_for("listening")["port"]
        workers = [
            start(
                "afl-worker@.service",
                str(worker),
                options="" if worker else "--policy /etc/afl/site.yaml --http 127.0.0.1:0",
                AFL_SERVER=f"localhost:{port}",
            )
            for worker in range(3)
        ]
        first.expect(0)
        for worker in workers:
            worker.expect(0)
    finally:
        for process in processes:
            process.close()
    assert (var / "runs/first/summary.json").exists()
    assert (var / "audit.jsonl").exists()


def test_options_need_no_other_unit() -> None:
    """A second ExecStart is an error of systemd's: the operator's options are words of the first. Not to name
    any is no warning in the journal."""
    settings = unit("afl-worker@.service")
    assert settings["ExecStart"].endswith(" $AFL_OPTIONS")
    assert settings["Environment"] == "AFL_OPTIONS="
    # A worker's own port: two on one machine cannot share that of --http.
    assert settings["EnvironmentFile"] == "/etc/afl/worker.env -/etc/afl/worker-%i.env"
