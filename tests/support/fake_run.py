"""A run without sockets, for what shows runs: any number of workers, in whatever state a test wants."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from afl._version import __version__
from afl.config import config_from_mapping
from afl.core.grid import IntegerRound
from afl.core.messages import Kind
from afl.core.rounds.results import Evaluation, RoundSummary
from afl.errors import ExitCode
from afl.wire.accounting import FrameContent, Traffic
from afl_server.federation.counters import Counters
from afl_server.federation.snapshot import Connection, Ending, OpenStep, RunDescription, Snapshot
from afl_server.network.door import Strangers
from afl_server.pages.dual_window import DualWindow
from afl_server.pages.page_data import Sources
from afl_server.pages.recent_events import RecentEvents
from afl_server.storage.records import RunRecords

DIM = 100_000
PAYLOAD = 40_000
"""Bytes of a report and of a step."""


class FakeRun:
    """A run to take snapshots of; rounds are played with :meth:`play`.

    Every worker is there, on a connection of its own, but for those in ``gone`` and ``unseen``.

    Args:
        folder: an empty folder for its records.
        more: of the configuration.

    Attributes:
        gone: lost workers, and for how many seconds they have been.
        unseen: workers that have never come.
        late: workers that are there and are waited for.
        integers: of the rounds that are played; ``None`` where values are float32.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 3,
        rounds: int = 2000,
        name: str = "digits",
        seed: int = 0,
        more: Mapping[str, Any] | None = None,
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
                **(more or {}),
            }
        )
        self.run_id = "20260101-000000-abcdef"
        self.records = RunRecords.create(self.run_id, folder, self.config)
        self.counters = Counters(starts=1)
        self.integers: IntegerRound | None = None
        self.ending: Ending | None = None
        self.gone: dict[int, float] = {}
        self.unseen: set[int] = set()
        self.late: set[int] = set()
        self.began_at = self.step_opened_at = time.monotonic()
        self.first_closed: tuple[float, int] | None = None
        self.dual_window = DualWindow.of(self.config)
        self.report_seconds = list(self.generator.gamma(20, 0.002, workers))
        self._skill = self.generator.uniform(0.2, 1.0, workers)
        self._weights = np.full(workers, 1 / workers)
        self._description = RunDescription(
            run_id=self.run_id,
            task=name,
            algorithm="afl-com",
            directory=folder,
            workers=workers,
            rounds=rounds,
            dim=DIM,
            restart_length=self.config.algorithm.restart_length,
            is_compressed=True,
            keeps_residuals=True,
        )

    @staticmethod
    def _session(worker: int, now: float) -> Connection:
        peer = f"ipv4:10.0.0.{worker % 250}:40000"
        return Connection(peer, [worker], True, None, __version__, now - 61.0)

    def snapshot(self) -> Snapshot:
        """The run now."""
        records, now, workers = self.records, time.monotonic(), range(self.config.workers)
        missing = {*self.gone, *self.unseen}
        closed = 0 if records.round is None else records.round.round
        return Snapshot(
            run=self._description,
            began_at=self.began_at,
            ending=self.ending,
            step=OpenStep(
                kind=Kind.TRAIN,
                round=closed + 1,
                synchronization=closed + 1,
                opened_at=self.step_opened_at,
                awaited=sorted(self.late | missing),
                waiting_bytes=0,
            ),
            updates_applied=closed,
            last_round=records.round,
            round_seconds=records.round_seconds,
            first_closed=self.first_closed,
            step_seconds={Kind.TRAIN: 0.05},
            report_seconds=self.report_seconds,
            outcome_seconds=0.001,
            dual_weights=self._weights,
            evaluation=records.last_evaluation,
            last=records.ranking.last,
            best=records.ranking.best,
            residual_norm=None,
            sessions=len(workers) - len(missing),
            connections={worker: self._session(worker, now) for worker in workers if worker not in missing},
            names=self.config.names,
            known=set(workers) - self.unseen,
            lost_at={worker: now - seconds for worker, seconds in self.gone.items()},
            counters=self.counters.copied(),
            sum_restarts=0,
            quarantined=(),
            incidents={"absent": [0 for _ in workers]},
        )

    def sources(self, events: RecentEvents) -> Sources:
        """What the server's pages are made from."""
        assert self.records.history is not None
        return Sources(
            self.snapshot,
            lambda: None,
            self.records.history,
            self.dual_window,
            events,
            self.records.sites,
            Strangers,
        )

    def play(self, rounds: int, *, evaluate_every: int = 10) -> None:
        """Close rounds; every so many are evaluated."""
        workers, block = self.config.workers, self.config.algorithm.block_length
        for _ in range(rounds):
            number = 1 + (self.records.round.round if self.records.round else 0)
            loss = self._skill * (0.3 + 2 * np.exp(-number / 400)) + self.generator.normal(0, 0.02, workers)
            for count in (self.counters.uplink, self.counters.downlink):
                count.add(PAYLOAD, FrameContent(Traffic.GRADIENT, values=PAYLOAD - 20), workers)
                count.float_equivalents += workers * PAYLOAD / 4
                self.counters.saved_bytes += workers * (4 * DIM - PAYLOAD)
            summary = RoundSummary(number, number, loss, self._weights.copy(), integers=self.integers)
            self.dual_window.add(number, self._weights)
            self.records.train_round(
                summary, seconds=0.05, up=self.counters.uplink, down=self.counters.downlink
            )
            if number % block == 0:
                self._weights = np.full(workers, 1 / workers)
            else:
                grown = self._weights * np.exp(0.1 * loss)
                self._weights = grown / grown.sum()
            if number % evaluate_every == 0:
                self._evaluate(number, loss)
            if self.first_closed is None:
                self.first_closed = (time.monotonic() - 1, number)
        self.step_opened_at = time.monotonic()

    def _evaluate(self, number: int, loss: Any) -> None:
        noisy = np.round(1 - np.clip(loss, 0.01, 2.4) * 0.35, 3)
        metrics = tuple(
            {"loss": float(abs(own)), "accuracy": float(accuracy), **self._other(float(accuracy))}
            for own, accuracy in zip(loss, noisy, strict=True)
        )
        evaluation = Evaluation(number, number, metrics, (360,) * self.config.workers, ())
        self.records.ranking.see(evaluation)
        self.records.evaluation(evaluation, up=self.counters.uplink, down=self.counters.downlink)

    def _other(self, accuracy: float) -> dict[str, float]:
        """The metric that ranks, where the configuration names one."""
        by = self.config.evaluation.rank_by
        return {} if by is None else {by: round(0.4 + 0.6 * accuracy**2, 4)}

    def end(self, code: ExitCode, reason: str, *, can_resume: bool = False) -> None:
        """The run is over."""
        self.ending = Ending(code, reason, can_resume)

    def close(self) -> None:
        """Leave no file open."""
        self.records.close()
