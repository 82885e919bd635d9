"""Finite numbers whose sum is not: noticed where they are added, never sent on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_federation import as_written

from afl.core.algorithms.registry import server_half
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.codecs.plain import bytes_of
from afl.core.compressors import create
from afl.core.error_feedback import ErrorFeedback
from afl.core.messages import Position
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import NonFiniteError

LARGEST = float(np.finfo(np.float32).max)


def test_error_feedback_that_overflows_says_so() -> None:
    feedback = ErrorFeedback(4)
    top = create("top-k", 4, {"ratio": 0.25}).realize(SharedRandomness.from_int(0).stream(Purpose.COMPRESSOR))
    feedback.compress(torch.tensor([LARGEST, LARGEST, 0.0, 0.0]), top)
    with pytest.raises(NonFiniteError, match="overflows float32"):
        feedback.compress(torch.tensor([0.0, LARGEST, 0.0, 0.0]), top)


@pytest.mark.parametrize("compressor", [CompressorChoice(), CompressorChoice("top-k", {"ratio": 1.0})])
def test_a_sum_of_workers_that_overflows_never_reaches_the_model(compressor: CompressorChoice) -> None:
    settings = AlgorithmSettings(2, 10, 5, 0.1, 0.1, compressor, compressor)
    params = torch.zeros(2)
    make = server_half if compressor.name == "identity" else as_written
    server = make(settings, params, SharedRandomness.from_int(0))
    (header,) = server.expected_payloads(Position(1, 0))
    values = np.array([LARGEST, 1.0], dtype=np.float32)
    indices = b"" if compressor.name == "identity" else b"\x03"
    coded = header.__class__(**{**vars(header), "index_bytes": len(indices), "index_coding": 1})
    for worker in range(2):
        server.add_loss(worker, 1.0)
        server.add_piece(worker, 0, coded, indices + bytes(bytes_of(values)))
    with pytest.raises(NonFiniteError, match=r"round 1: .* overflows float32"):
        server.close()
    server.settle()
    assert params.tolist() == [0.0, 0.0]
