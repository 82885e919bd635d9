"""What a federation says of a site that is served worst and weighted below even, also when it is put back."""

from __future__ import annotations

from typing import Any

import federation_world
import pytest
from federation_world import config_of, ended

from afl.core.messages import EVALUATION_PHASE, Position
from afl_server.pages.progress import phase_of

ALGORITHM: dict[str, Any] = {"name": "afl-br", "rounds": 16, "eta_w": 0.1, "eta_q": 0.5, "block": 100}


@pytest.mark.parametrize("resumes_at", [None, Position(13, 0)])
def test_it_is_told_once_and_shown_as_long_as_it_is_so(
    resumes_at: Position | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = federation_world.loss_of

    def told(worker: int, position: Position) -> float:
        if worker == 2:
            return 50.0 if position.phase == EVALUATION_PHASE else 0.01
        return honest(worker, position)

    monkeypatch.setattr(federation_world, "loss_of", told)
    world = ended(config_of(algorithm=ALGORITHM), resumes_at=resumes_at)
    lines = [line for line in world.log if line.event.name == "site_warning"]
    assert [line.event.extra["round"] for line in lines] == [10]
    assert lines[0].message.startswith("worker 2 is served worst (loss 50), and weighted below even")
    snapshot = world.federation.snapshot()
    assert snapshot.evaluation is not None
    (warning,) = snapshot.evaluation.warnings
    assert "at the last 8 evaluations" in warning
    assert phase_of(snapshot, 0.0)[0] == "finished"


def test_nothing_is_told_of_a_run_that_serves_its_worst() -> None:
    world = ended(config_of(algorithm=ALGORITHM))
    assert not [line for line in world.log if line.event.name == "site_warning"]
    snapshot = world.federation.snapshot()
    assert snapshot.evaluation is not None
    assert snapshot.evaluation.warnings == ()
