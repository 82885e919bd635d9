"""What server and worker of two versions must compute alike, as one digest: it says when they do not."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from afl.core import arithmetic as module
from afl.core.algorithms.optimizers import Momentum
from afl.core.algorithms.settings import AlgorithmSettings, CompressorChoice, OptimizerChoice
from afl.core.arithmetic import arithmetic
from afl.core.codecs.payload import pack_to_add
from afl.core.compressors import scaled_sign
from afl.core.compressors.identity import Identity


def choice(name: str, **options: float) -> CompressorChoice:
    return CompressorChoice(name, options)


def settings(
    up: CompressorChoice, down: CompressorChoice | None = None, optimizer: str = "sgd", **others: Any
) -> AlgorithmSettings:
    return AlgorithmSettings(
        workers=4,
        rounds=100,
        block=1,
        eta_w=0.5,
        eta_q=0.1,
        uplink=up,
        downlink=down or up,
        optimizer=OptimizerChoice(optimizer),
        weight_decay=0.01,
        **others,
    )


RUNS = {
    "adam": settings(choice("identity"), optimizer="adam"),
    "rand-k": settings(choice("rand-k", ratio=0.1)),
    "integers": settings(choice("rand-k", ratio=0.1, bits=4), optimizer="momentum"),
    "masked": settings(choice("rand-k", ratio=0.1, bits=12), secure_aggregation=True),
    "top-k, signs": settings(choice("top-k", ratio=0.1), choice("scaled-sign")),
    "projection": settings(choice("projection", ratio=0.1)),
    "dct-projection": settings(choice("dct-projection", ratio=0.1, bits=8)),
}

DIGESTS = {
    "adam": "abbb75b0aaae2acb",
    "rand-k": "28e138f2a57401af",
    "integers": "042ea97215f313ce",
    "masked": "7dcd835baa44cbc1",
    "top-k, signs": "f51165f663a7a29d",
    "projection": "37991a8765b69ffe",
    "dct-projection": "ed75e1f220e0ba87",
}
"""As every version of protocol 3 has them."""


def digest(run: AlgorithmSettings, dim: int = 1000) -> str:
    return hashlib.sha256(arithmetic(run, dim)).hexdigest()[:16]


@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_same_in_every_version_of_the_protocol(name: str) -> None:
    """One that computes otherwise is refused at each site that is not upgraded with the server: see
    CONTRIBUTING.md, "Compatibility", before you change a digest here."""
    assert digest(RUNS[name]) == DIGESTS[name]


def larger_scale(array: np.ndarray[Any, np.dtype[np.float32]]) -> np.float32:
    return np.nextafter(SCALE_OF(array), np.float32(np.inf))


SCALE_OF = scaled_sign.scale_of


@pytest.mark.parametrize(
    ("name", "owner", "attribute", "other"),
    [
        ("top-k, signs", scaled_sign, "scale_of", larger_scale),
        ("integers", Momentum, "_constants", lambda _, __, eta: (np.nextafter(0.9, 1, dtype="f4"), eta)),
        ("integers", module, "pack", pack_to_add),
    ],
    ids=["compressor", "optimizer", "codec"],
)
def test_one_bit_more_shows(
    monkeypatch: pytest.MonkeyPatch, name: str, owner: object, attribute: str, other: object
) -> None:
    monkeypatch.setattr(owner, attribute, other)
    assert digest(RUNS[name]) != DIGESTS[name]


@pytest.mark.parametrize("dim", [1, 2, 1 << 30])
def test_any_dimension_will_do(dim: int) -> None:
    assert len({digest(run, dim) for run in RUNS.values()}) > 1


def test_a_compressor_of_somebody_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = type("Theirs", (Identity,), {"__module__": "theirs"})
    monkeypatch.setattr(module, "compressor_class", lambda _: theirs)
    assert digest(settings(choice("only-for-long-vectors"))) == digest(settings(choice("identity")))
