"""Whether two programs compute alike, whatever their versions: what those parts of a run's arithmetic that
server and workers share make of numbers that are always the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from afl.core.algorithms.realizations import Realizations
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.codecs.payload import pack
from afl.core.compressors import compressor_class
from afl.core.error_feedback import ErrorFeedback
from afl.core.randomness import SEED_BYTES, Purpose, SharedRandomness

MOST_DIM = 256
ROUNDS = 3
ETA_W = 0.125
"""In place of the run's, with which these numbers could leave float32's range."""


def arithmetic(settings: AlgorithmSettings, dim: int) -> bytes:
    """What a run's compressors, codecs and optimizer make of fixed vectors of at most :data:`MOST_DIM`
    coordinates in up to :data:`ROUNDS` rounds, on the CPU: messages, residuals and model. It takes
    milliseconds. A compressor that is not built in is left out: it need not take such short vectors.

    Args:
        settings: the run's.
        dim: d, of the run.
    """
    dim = min(dim, MOST_DIM)
    settings = replace(
        settings,
        eta_w=ETA_W,
        tensors=(),
        uplink=_built_in(settings.uplink),
        downlink=_built_in(settings.downlink),
    )
    randomness = SharedRandomness(bytes(SEED_BYTES))
    realizations = Realizations(settings, dim, randomness)
    vectors = randomness.stream(Purpose.INITIALIZATION).uniform((ROUNDS + 1) * dim) - 0.5
    params, *signals = torch.from_numpy(vectors.astype(np.float32).reshape(-1, dim))
    up, down = ErrorFeedback(dim), ErrorFeedback(dim)
    parts: list[bytes] = []
    for round_, signal in enumerate(signals[: settings.rounds], start=1):
        realization = realizations.of_uplink(round_)
        message = up.compress(signal, realization)
        update = down.compress(realization.decode(message), realizations.of_downlink(round_))
        for form, compressed in ((realizations.uplink, message), (realizations.down_form, update)):
            parts.append(bytes(pack(form, compressed).data))
        realizations.apply(round_, params, update)
    parts += [vector.numpy().astype("<f4").tobytes() for vector in (params, up.residual, down.residual)]
    return b"".join(parts)


def _built_in(choice: CompressorChoice) -> CompressorChoice:
    is_ours = compressor_class(choice.name).__module__.startswith("afl.")
    return choice if is_ours else CompressorChoice()
