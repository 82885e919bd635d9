"""Any compressor up with any down, whole federations, against Algorithm 2 in plain numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from core_compressors import compressed
from core_federation import Federation, Outcome, Problem, Vector
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from afl.core.algorithms.afl_com import Realizations
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice
from afl.core.codecs.payload import check_header, expected, pack, unpack
from afl.core.compressors import create
from afl.core.error_feedback import ErrorFeedback
from afl.core.randomness import Purpose, SharedRandomness
from afl.errors import NonFiniteError

SEED = 7
WORKERS, DIM, ROUNDS, BLOCK = 4, 41, 17, 5
ETA_W, ETA_Q = 0.02, 0.013
PROBLEM = Problem.random(WORKERS, DIM)

CHOICES = {
    "identity": CompressorChoice(),
    "top-k": CompressorChoice("top-k", {"ratio": 0.2}),
    "rand-k": CompressorChoice("rand-k", {"ratio": 0.3}),
    "scaled-sign": CompressorChoice("scaled-sign"),
    "projection": CompressorChoice("projection", {"ratio": 0.3}),
    "dct-projection": CompressorChoice("dct-projection", {"ratio": 0.4}),
}
PAIRS = list(itertools.product(CHOICES, CHOICES))
EXACT = {"identity", "top-k", "rand-k", "scaled-sign"}
"""Those whose independent version has the same bits."""


def algorithm_2(up: CompressorChoice, down: CompressorChoice) -> Iterator[tuple[Vector, Vector, Vector]]:
    """w, the workers' residuals and the server's after each round."""
    w = PROBLEM.start.copy()
    e = np.zeros((WORKERS, DIM), dtype=np.float32)
    e_hat = np.zeros(DIM, dtype=np.float32)
    q: NDArray[np.float64] = np.full(WORKERS, 1 / WORKERS)
    for t in range(1, ROUNDS + 1):
        losses = np.array([PROBLEM.loss(i, t, w) for i in range(WORKERS)])
        total = np.zeros(DIM, dtype=np.float32)
        for i in range(WORKERS):
            p = e[i] + np.float32(q[i]) * PROBLEM.gradient(i, t, w)
            c = compressed(up, p, SEED, t)
            e[i] = p - c
            total = total + c
        s = e_hat + total
        own = Purpose.COMPRESSOR if down == up else Purpose.DOWNLINK_COMPRESSOR
        d = compressed(down, s, SEED, t, own)
        e_hat = s - d
        raised = q * np.exp(ETA_Q * (losses - losses.max()))
        q = np.full(WORKERS, 1 / WORKERS) if t % BLOCK == 0 else raised / raised.sum()
        w = w - np.float32(ETA_W) * d
        yield w, e, e_hat


def run(up: str, down: str, **options: object) -> Outcome:
    run_settings = AlgorithmSettings(WORKERS, ROUNDS, BLOCK, ETA_W, ETA_Q, CHOICES[up], CHOICES[down])
    return Federation(PROBLEM, run_settings, evaluate_every=6, seed=SEED, **options).run()  # type: ignore[arg-type]


def close(found: Vector, right: Vector) -> bool:
    return float(np.linalg.norm(found - right)) <= 1e-5 * max(1.0, float(np.linalg.norm(right)))


@pytest.mark.parametrize(("up", "down"), PAIRS)
def test_any_pair_is_algorithm_2(up: str, down: str) -> None:
    *_, (w, e, e_hat) = algorithm_2(CHOICES[up], CHOICES[down])
    assert np.abs(w - PROBLEM.start).max() > 0.01
    hosts = [(0, 2), (1, 3)]
    outcome = run(up, down, hosts=hosts, chaos=1)
    assert all(evaluation.diverged == () for evaluation in outcome.evaluations)
    for model in outcome.models:
        assert model.tobytes() == outcome.server.tobytes()
    if {up, down} <= EXACT:
        assert outcome.server.tobytes() == w.tobytes()
        assert outcome.uplink_residuals.tobytes() == e.tobytes()
        assert outcome.downlink_residual.tobytes() == e_hat.tobytes()
    else:
        assert close(outcome.server, w)
        assert close(outcome.uplink_residuals, e)
        assert close(outcome.downlink_residual, e_hat)
    # The order of arrival, the cuts and the hosting change no bit, whatever the compressors.
    assert run(up, down).server.tobytes() == outcome.server.tobytes()


@pytest.mark.parametrize("name", ["identity", "rand-k", "projection", "dct-projection"])
def test_an_additive_and_idempotent_compressor_both_ways_leaves_no_downlink_residual(name: str) -> None:
    assert run(name, name).downlink_residual.tobytes() == bytes(4 * DIM)
    as_written = run(name, name, forward=False)
    size = float(np.linalg.norm(as_written.uplink_residuals)) or 1.0
    if name in EXACT:
        assert as_written.downlink_residual.tobytes() == bytes(4 * DIM)
    else:
        assert 0 < np.linalg.norm(as_written.downlink_residual) < 1e-5 * size
        assert close(as_written.server, run(name, name).server)


@pytest.mark.parametrize(
    ("up", "down"),
    [("scaled-sign", "scaled-sign"), ("identity", "projection"), ("projection", "dct-projection")],
)
def test_any_other_downlink_keeps_a_residual(up: str, down: str) -> None:
    assert run(up, down).downlink_residual.any()


@given(
    name=st.sampled_from(sorted(CHOICES)),
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 150),
    sparse=st.booleans(),
)
def test_what_is_kept_is_what_the_decoded_bytes_leave_to_the_bit(
    name: str, seed: int, dim: int, sparse: bool
) -> None:
    random = np.random.default_rng(seed)
    gradient = (random.standard_normal(dim) * 10.0 ** random.integers(-20, 20)).astype(np.float32)
    if sparse:
        gradient[random.uniform(size=dim) < 0.5] = 0
    compressor = create(name, dim, CHOICES[name].options)
    realization = compressor.realize(SharedRandomness.from_int(3).stream(Purpose.COMPRESSOR, 1))
    feedback = ErrorFeedback(dim)
    feedback.residual[:] = torch.from_numpy(random.permutation(gradient))
    p = feedback.residual.numpy() + np.float32(0.3) * gradient
    payload = pack(compressor, feedback.compress(torch.from_numpy(np.float32(0.3) * gradient), realization))
    check_header(payload.header, expected(compressor))
    found = unpack(payload.header, b"".join(payload.sections))
    decoded = realization.decode(found).numpy()
    assert feedback.residual.numpy().tobytes() == (p - decoded).tobytes()
    # The same bits again from the same bytes, by whichever method, and in a packet made of what was read.
    again = pack(compressor, found)
    assert (again.header, b"".join(again.sections)) == (payload.header, b"".join(payload.sections))
    total = torch.zeros(dim)
    realization.add_to(total, found)
    assert (total.numpy() == decoded).all()
    params = torch.from_numpy(p.copy())
    realization.step(params, found, 0.7)
    assert params.numpy().tobytes() == (p - np.float32(0.7) * decoded).tobytes()


@pytest.mark.parametrize(("up", "down"), PAIRS)
def test_server_and_workers_agree_on_the_digest_and_other_seeds_do_not(up: str, down: str) -> None:
    run_settings = AlgorithmSettings(WORKERS, ROUNDS, BLOCK, ETA_W, ETA_Q, CHOICES[up], CHOICES[down])
    one, same, other = (
        Realizations(run_settings, DIM, SharedRandomness.from_int(seed)).digest_material()
        for seed in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_sum_beyond_float32_ends_the_round_by_name(name: str) -> None:
    dim = 16
    compressor = create(name, dim, CHOICES[name].options)
    realization = compressor.realize(SharedRandomness.from_int(3).stream(Purpose.COMPRESSOR, 1))
    feedback = ErrorFeedback(dim)
    feedback.residual.fill_(3e38)
    with pytest.raises(NonFiniteError):
        feedback.compress(torch.full((dim,), 3e38), realization)
