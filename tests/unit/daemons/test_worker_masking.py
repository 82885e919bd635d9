"""Which masks a worker holds for used, by what the server says it has."""

from __future__ import annotations

import os

import numpy as np
import pytest

from afl.core.codecs.modular import modular
from afl.core.messages import EVALUATION_PHASE, NOWHERE, Encoding, Kind, Position, Report, Role
from afl.core.secrecy.keyring import Keyring
from afl_worker.keys import KeysInMemory, Standing
from afl_worker.masking import Masking

FIRST = Position(1, 0)


def one_of_two(*, metrics: bool) -> Masking:
    """Worker 0 of two, in the first key epoch; its first report has gone out."""
    rings = [
        Keyring(
            "run",
            [worker],
            2,
            least=2,
            sign=lambda _: (b"", (), b""),
            verify=lambda _: None,
            random=os.urandom,
            store=KeysInMemory(),
        )
        for worker in range(2)
    ]
    masking = Masking(rings[0], {}, (), metrics=metrics)
    offers = [masking.offer(1, {0: Standing(NOWHERE, is_held=False)}, ()), rings[1].offer(1)]
    masking.take(1, offers)
    payload = modular(Encoding.DENSE, 16).whole(np.arange(5), Role.UPDATE, 5)
    report = Report(0, FIRST, 0.5, 8, (payload.header,))
    ((_, (_, (sent,))),) = masking.sent([(Kind.TRAIN, (report, [payload]))])
    assert bytes(sent.data) != bytes(payload.data)
    return masking


@pytest.mark.parametrize(
    ("metrics", "standing", "held", "epoch"),
    [
        # What is here still is sent again as it was; what the server has need not be here.
        (False, Standing(FIRST, is_held=False), [0], 1),
        (False, Standing(FIRST, is_held=True), [0], 1),
        (False, Standing(FIRST, is_held=False), [], 2),
        # Metrics that are shown had no mask.
        (False, Standing(Position(1, EVALUATION_PHASE), is_held=True), [], 1),
        (True, Standing(Position(1, EVALUATION_PHASE), is_held=True), [], 2),
        (True, Standing(Position(1, EVALUATION_PHASE), is_held=False), [], 1),
        (False, Standing(Position(2, 0), is_held=False), [], 1),
        (False, Standing(Position(2, 0), is_held=True), [], 2),
        # A server that was put back.
        (False, Standing(NOWHERE, is_held=False), [], 2),
    ],
)
def test_masks_that_may_have_been_used_end_the_epoch(
    metrics: bool, standing: Standing, held: list[int], epoch: int
) -> None:
    assert one_of_two(metrics=metrics).offer(1, {0: standing}, held).epoch == epoch
