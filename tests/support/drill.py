"""A federation whose processes die, stop and lose connections, and are started again until it is over."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from afl.daemon.fault_points import VARIABLE
from afl.runs.files import STATE_FOLDER
from afl_server.storage.store import RunStore
from support.federation import Federation, needed_options
from support.process import Process
from support.proxy import Proxy

TICK_S = 0.02
STOPPED_S = 1.0
"""How long a process that was stopped (SIGSTOP) stays so."""

SERVER = "server"

VARYING = {
    "seconds",
    # Of joint reports, and who joins whom depends on who was there.
    "integers",
    *(f"{way}_{what}" for way in ("uplink", "downlink") for what in ("bytes", "float_equivalents")),
}
"""What a run's metrics say that depends on when who was connected."""


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        points: for the server (``"server"``) or a group of workers, the armed fault points of its first
            process, its second, and so on (``afl.daemon.fault_points``).
        kills: SIGKILLs to processes drawn at random, at random times.
        cuts: resets of all connections at random times.
        pause: seconds between two of them, at most.
        rate: bytes a second that a connection carries each way; 0 for as many as come.
    """

    points: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kills: int = 0
    cuts: int = 0
    pause: float = 0.5
    rate: int = 0
    seed: int = 1


class Drill:
    """Runs one federation under faults; a context manager is not needed: :meth:`run` leaves nothing behind.

    Args:
        groups: the workers of each process, as for ``--id``.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, groups: Sequence[str]) -> None:
        self.federation = Federation(config, folder)
        self.kills = self.cuts = 0
        self._groups = groups
        self._options = needed_options(config)
        self._running: dict[str, Process] = {}
        self._starts: dict[str, int] = {}
        self._stopped: dict[str, float] = {}
        self._aimed_at: Process | None = None

    def run(self, faults: Faults, *, timeout: float = 300.0) -> Federation:
        """From start to end; every process that was killed is started again.

        Raises:
            AssertionError: if a process ends by itself in another way than well, or time runs out.
        """
        chance = random.Random(faults.seed)
        deadline = time.monotonic() + timeout
        due = time.monotonic() + chance.uniform(0, faults.pause)
        with Proxy() as door, self.federation:
            door.rate = faults.rate
            # The federation started a server without faults; it has done nothing yet.
            self.federation.servers.pop().kill()
            for name in (SERVER, *self._groups):
                self._start(name, faults, door)
            while self._running:
                assert time.monotonic() < deadline, self.federation.report()
                time.sleep(TICK_S)
                self._look(faults, door)
                if time.monotonic() < due or not self._running:
                    continue
                due = time.monotonic() + chance.uniform(0, faults.pause)
                if self.kills < faults.kills:
                    self._running[chance.choice(sorted(self._running))].send_signal(signal.SIGKILL)
                    self.kills += 1
                if self.cuts < faults.cuts:
                    door.cut()
                    self.cuts += 1
        return self.federation

    def starts(self, name: str) -> int:
        """How many processes the server, or a group of workers, has had."""
        return self._starts[name]

    def _start(self, name: str, faults: Faults, door: Proxy) -> None:
        number = self._starts.get(name, 0)
        self._starts[name] = number + 1
        armed = faults.points.get(name, ())
        environment = {VARIABLE: armed[number] if number < len(armed) else ""}
        if name == SERVER:
            self._running[name] = self.federation.start_server(environment=environment)
        else:
            self._running[name] = self.federation.start(
                name, *self._options, server=door.address, environment=environment
            )

    def _look(self, faults: Faults, door: Proxy) -> None:
        for name, process in list(self._running.items()):
            if process.is_running:
                self._wake(name, process)
                if name == SERVER and process is not self._aimed_at:
                    listening = process.logged("listening")
                    if listening:
                        door.aim(listening[0]["port"])
                        self._aimed_at = process
                continue
            status = process.wait()
            if status == -signal.SIGKILL:
                self._start(name, faults, door)
                continue
            assert status == 0, f"{name} ended with {status}:\n{self.federation.report()}"
            del self._running[name]

    def _wake(self, name: str, process: Process) -> None:
        try:
            is_stopped = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            # It has ended since it was looked at.
            return
        if not is_stopped:
            return
        since = self._stopped.setdefault(name, time.monotonic())
        if time.monotonic() - since > STOPPED_S:
            del self._stopped[name]
            process.send_signal(signal.SIGCONT)


def result_of(federation: Federation) -> dict[str, Any]:
    """All that a run leaves, as bytes where it is numbers, but for times and traffic: equal to the bit."""
    lines = [
        {key: value for key, value in line.items() if key not in VARYING}
        for event in ("round", "evaluation")
        for line in federation.records(event)
    ]
    return {
        "lines": lines,
        **{name: federation.model_bytes(name) for name in ("final", "random", "best")},
        "summary": {key: federation.summary()[key] for key in ("result", "rounds", "last", "best")},
        "state": server_state(federation.directory),
    }


def server_state(directory: Path) -> dict[str, Any]:
    """The model, the dual weights, the downlink residual and how many steps were closed, at a run's end."""
    with RunStore(directory / STATE_FOLDER, "process") as store:
        checkpoint, entries = store.load()
        assert not list(entries), "the last checkpoint is not the run's end"
        arrays = {name: array.tobytes() for name, array in checkpoint.arrays.items()}
        return {"steps": checkpoint.sequence, "engine": checkpoint.values["engine"], **arrays}
