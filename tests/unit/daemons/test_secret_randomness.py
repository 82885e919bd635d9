"""Noise and draws of a cipher's words: normal to the far tails, finite at every word, and secret."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from afl_worker.training.noise import SecretStream

KEY = bytes(range(16))


def normals(stream: SecretStream, count: int, deviation: float = 1.0) -> NDArray[np.float64]:
    values = torch.zeros(count, dtype=torch.float64)
    stream.add_normals(values, deviation)
    return values.numpy()


def below(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The normal distribution's."""
    return np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])


def test_numbers_are_normal_and_independent() -> None:
    count = 200_001
    found = normals(SecretStream(KEY), count)
    # Kolmogorov and Smirnov's distance: above 1.95 / sqrt(n) once in a thousand keys, and this is one key.
    ordered = below(np.sort(found))
    places = np.arange(count + 1) / count
    assert max(np.abs(ordered - places[1:]).max(), np.abs(ordered - places[:-1]).max()) < 1.95 / math.sqrt(
        count
    )
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((found**power).mean() - moment) < 4 * math.sqrt(variance / count)
    # The two of a pair lie half a block apart; neighbours, and radii of pairs, have nothing in common.
    half = 1 << 14
    for other in (1, half):
        for power in (1, 2):
            one, two = found[:-other] ** power, found[other:] ** power
            assert abs(np.corrcoef(one, two)[0, 1]) < 4 / math.sqrt(count)


def test_the_far_tails_are_as_heavy_as_they_should_be() -> None:
    stream, beyond, count = SecretStream(KEY), dict.fromkeys((4.0, 5.0), 0), 1 << 24
    values = torch.empty(1 << 20)
    for _ in range(count // len(values)):
        stream.add_normals(values.zero_(), 1.0)
        for at in beyond:
            beyond[at] += int((values.abs() > at).sum())
    for at, found in beyond.items():
        expected = count * math.erfc(at / math.sqrt(2))
        assert abs(found - expected) < 4 * math.sqrt(expected), (
            f"{found} beyond {at}, {expected:.0f} expected"
        )


class Given(SecretStream):
    """A stream of the same word."""

    def __init__(self, radius: int, angle: int) -> None:
        super().__init__()
        self._given = radius, angle

    def words(self, count: int) -> NDArray[np.uint64]:
        found: NDArray[Any] = np.repeat(np.array(self._given, dtype=np.int64), count // 2)
        return found.view(np.uint64)


EXTREMES = (0, 1, -1, 2**62, 2**63 - 1, -(2**63))


@pytest.mark.parametrize("radius", EXTREMES)
@pytest.mark.parametrize("angle", EXTREMES)
def test_every_word_gives_a_finite_number(radius: int, angle: int) -> None:
    found = normals(Given(radius, angle), 2, 3.0)
    wanted = 3 * math.sqrt(-2 * math.log(min(1.0, (abs(radius) + 0.5) / 2**63)))
    assert np.isfinite(found).all()
    assert np.hypot(*found) == pytest.approx(wanted, abs=1e-7)
    assert math.atan2(found[1], found[0]) == pytest.approx(math.pi * angle / 2**63) or wanted < 1e-7


@pytest.mark.parametrize("count", [1, 2, 3, 40_001])
def test_noise_is_added_to_what_is_there(count: int) -> None:
    for kind in (torch.float32, torch.float64):
        values = torch.arange(count, dtype=kind)
        SecretStream(KEY).add_normals(values, 1e-3)
        added = (values - torch.arange(count)).double()
        wanted = torch.from_numpy(normals(SecretStream(KEY), count, 1e-3))
        tolerance = 2.0**-23 * count if kind is torch.float32 else 1e-9
        torch.testing.assert_close(added, wanted, atol=tolerance, rtol=0)


def test_each_stream_has_its_own_key_and_is_the_ciphers() -> None:
    # AES-128 of the blocks 0 and 1 under the key 0 (NIST's known answer for the block 0).
    words = SecretStream(bytes(16)).words(3)
    assert words.tobytes()[:16].hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"
    assert words.tobytes()[16:].hex() == "58e2fccefa7e3061"
    assert SecretStream().words(4).tolist() != SecretStream().words(4).tolist()
    stream = SecretStream(KEY)
    parts = [stream.words(count) for count in (4, 10, 50_000)]
    assert np.array_equal(np.concatenate(parts), SecretStream(KEY).words(50_014))


def test_a_draw_is_uniform() -> None:
    stream, counts, draws = SecretStream(KEY), np.zeros(20), 4000
    for _ in range(draws):
        chosen = stream.subset(20, 5)
        assert len(set(chosen.tolist())) == 5
        counts[chosen] += 1
    expected = draws / 4
    # Chi-squared with 19 degrees of freedom; draws without replacement spread less.
    assert ((counts - expected) ** 2 / (expected * 0.75)).sum() * 19 / 20 < 43.8
