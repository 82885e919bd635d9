"""What counts as spent when a worker's journal lacks what the server has seen."""

from __future__ import annotations

import pytest

from afl.core.messages import EVALUATION_PHASE, Position
from afl_worker.training.setup import lost_since


@pytest.mark.parametrize(
    ("kept", "open_", "begun", "lost"),
    [
        (None, (1, 0), False, (0, 0)),
        (None, (1, 0), True, (1, 1)),
        (None, (5, 0), False, (5, 5)),
        # As a worker that was killed finds it.
        ((4, 0), (5, 0), False, (0, 0)),
        ((5, 0), (5, 0), True, (0, 0)),
        ((5, 0), (5, EVALUATION_PHASE), False, (0, 0)),
        ((5, EVALUATION_PHASE), (5, EVALUATION_PHASE), True, (0, 0)),
        # An older copy.
        ((4, 0), (5, 0), True, (1, 1)),
        ((2, 0), (5, 0), False, (2, 3)),
        ((2, EVALUATION_PHASE), (5, 0), False, (2, 2)),
        ((5, 0), (5, EVALUATION_PHASE), True, (0, 1)),
        ((2, 0), (5, EVALUATION_PHASE), True, (3, 4)),
        ((2, 0), (5, EVALUATION_PHASE), False, (3, 3)),
        # A server that was put back.
        ((9, 0), (5, 0), False, (0, 0)),
    ],
)
def test_what_a_journal_lacks_counts(
    kept: tuple[int, int] | None, open_: tuple[int, int], begun: bool, lost: tuple[int, int]
) -> None:
    own = None if kept is None else Position(*kept)
    assert lost_since(own, Position(*open_), begun=begun) == lost
