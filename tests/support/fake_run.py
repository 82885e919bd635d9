"""A run without sockets, for what shows runs: any number of workers, in whatever state a test wants."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from afl.config import config_from_mapping
from afl.core.engine import Evaluation, RoundSummary
from afl.core.messages import Kind, Position, Step
from afl.errors import ExitCode
from afl.wire.accounting import FrameContent, Traffic
from afl_server.coordinator import Coordinator
from afl_server.dual_window import DualWindow
from afl_server.incidents import Incidents
from afl_server.records import RunRecords
from afl_server.tallies import Tallies

DIM = 100_000
PAYLOAD = 40_000
"""Bytes of a report and of a step."""


class FakeRoster:
    """Who is there: every worker on a connection of its own, but for those in ``gone`` and ``unseen``."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.gone: dict[int, float] = {}
        self.unseen: set[int] = set()

    def __len__(self) -> int:
        return self.workers - len(self.missing())

    @property
    def processes(self) -> int:
        return self.workers - len(self.unseen)

    def missing(self) -> list[int]:
        return sorted({*self.gone, *self.unseen})

    def was_known(self, worker: int) -> bool:
        return worker not in self.unseen

    def absence(self, worker: int) -> float | None:
        return None if worker in self.unseen else self.gone.get(worker, 0.0)

    def owner(self, worker: int) -> Any:
        if worker in self.missing():
            return None
        identity = SimpleNamespace(not_after=None)
        return SimpleNamespace(peer=f"ipv4:10.0.0.{worker % 250}:40000", workers=(worker,), identity=identity)


class FakeRun:
    """What a :class:`Coordinator` shows; rounds are played with :meth:`play`.

    Args:
        folder: an empty folder for its records.
    """

    def __init__(
        self, folder: Path, *, workers: int = 3, rounds: int = 2000, name: str = "digits", seed: int = 0
    ) -> None:
        self.generator = np.random.default_rng(seed)
        self.config = config_from_mapping(
            {
                "workers": workers,
                "task": {"name": name},
                "algorithm": {
                    "name": "afl-com",
                    "rounds": rounds,
                    "eta_w": 0.1,
                    "eta_q": 0.1,
                    "uplink": {"name": "rand-k", "ratio": 0.1},
                },
                "run": {"seed": 1},
            }
        )
        self.run_id = "20260101-000000-abcdef"
        self.records = RunRecords.create(self.run_id, folder, self.config)
        self.tallies = Tallies(starts=1)
        self.roster = FakeRoster(workers)
        self.vector = SimpleNamespace(dim=DIM)
        self.result: Future[tuple[ExitCode, str]] = Future()
        self.can_go_on = False
        self.step_opened_at = time.monotonic()
        self.step_seconds = {Kind.TRAIN: 0.05}
        self.outcome_seconds = 0.001
        self.dual_window = DualWindow.of(self.config)
        self.incidents = Incidents(workers)
        self.residual_norm: float | None = None
        self.report_seconds = list(self.generator.gamma(20, 0.002, workers))
        self.first_round: tuple[float, int] | None = None
        self.started_at = time.monotonic()
        self.gate = SimpleNamespace(expiry=None)
        self.late: set[int] = set()
        self._skill = self.generator.uniform(0.2, 1.0, workers)
        self._weights = np.full(workers, 1 / workers)
        self.engine: Any = SimpleNamespace(
            workers=workers,
            rounds=rounds,
            open_round=1,
            step=Step(Position(1, 0), Kind.TRAIN),
            dual_weights=self._weights,
            restarts=0,
            updates_applied=0,
            algorithm=SimpleNamespace(keeps_residuals=True, settings=SimpleNamespace(block=45)),
            missing=lambda: sorted(self.late | set(self.roster.missing())),
            collector=SimpleNamespace(waiting_bytes=0),
        )

    @property
    def run(self) -> Coordinator:
        """As the server's modules take it."""
        return cast("Coordinator", self)

    @property
    def is_over(self) -> bool:
        return self.result.done()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at

    def play(self, rounds: int, *, evaluate_every: int = 10) -> None:
        """Close rounds; every so many are evaluated."""
        workers, block = self.config.workers, self.config.algorithm.block_length
        for _ in range(rounds):
            number = 1 + (self.records.round.round if self.records.round else 0)
            loss = self._skill * (0.3 + 2 * np.exp(-number / 400)) + self.generator.normal(0, 0.02, workers)
            for count in (self.tallies.uplink, self.tallies.downlink):
                count.add(PAYLOAD, FrameContent(Traffic.GRADIENT, values=PAYLOAD - 20), workers)
                count.float_equivalents += workers * PAYLOAD / 4
                self.tallies.saved_bytes += workers * (4 * DIM - PAYLOAD)
            summary = RoundSummary(number, number, loss, self._weights.copy())
            self.dual_window.add(number, self._weights)
            self.records.train_round(
                summary, seconds=0.05, up=self.tallies.uplink, down=self.tallies.downlink
            )
            if number % block == 0:
                self._weights = np.full(workers, 1 / workers)
            else:
                grown = self._weights * np.exp(0.1 * loss)
                self._weights = grown / grown.sum()
            self.engine.dual_weights = self._weights
            self.engine.open_round = number + 1
            if number % evaluate_every == 0:
                self._evaluate(number, loss)
            if self.first_round is None:
                self.first_round = (time.monotonic() - 1, number)
        self.step_opened_at = time.monotonic()

    def _evaluate(self, number: int, loss: Any) -> None:
        noisy = np.round(1 - np.clip(loss, 0.01, 2.4) * 0.35, 3)
        metrics = tuple(
            {"loss": float(abs(own)), "accuracy": float(accuracy)}
            for own, accuracy in zip(loss, noisy, strict=True)
        )
        evaluation = Evaluation(number, number, metrics, (360,) * self.config.workers, ())
        self.records.evaluation(evaluation, up=self.tallies.uplink, down=self.tallies.downlink)

    def end(self, code: ExitCode, reason: str, *, can_go_on: bool = False) -> None:
        """The run is over."""
        self.can_go_on = can_go_on
        self.result.set_result((code, reason))

    def close(self) -> None:
        """Leave no file open."""
        self.records.close()
