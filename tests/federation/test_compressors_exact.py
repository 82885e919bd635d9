"""Scaled sign and the DCT projection through real processes, against the independent numpy script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import Federation, Reference, run_together

TOLERANCE = 1e-5
"""Relative, in the 2-norm, after 50 rounds: the script's cosine transform is a matrix, ours a Fourier
transform, and either is rounded to float32 in every round. Measured: 1e-7."""


def config_of(compressor: dict[str, Any], dim: int = 100) -> dict[str, Any]:
    return {
        "workers": 4,
        "task": {"name": "synthetic", "batch_size": 8, "options": {"dim": dim}},
        "algorithm": {
            "name": "afl-com",
            "rounds": 50,
            "eta_w": 0.9,
            "eta_q": 0.3,
            "uplink": compressor,
        },
        "evaluation": {"every": 20},
    }


def final(federation: Federation) -> np.ndarray[Any, np.dtype[np.float32]]:
    weights: np.ndarray[Any, np.dtype[np.float32]] = federation.model("final")["w"].numpy()
    return weights


def distance(
    found: np.ndarray[Any, np.dtype[np.float32]], right: np.ndarray[Any, np.dtype[np.float32]]
) -> float:
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def test_scaled_sign_both_ways_is_the_papers_algorithm_to_the_bit(tmp_path: Path) -> None:
    config = config_of({"name": "scaled-sign"})
    federation = run_together(config, tmp_path / "run", ["1,3", "0,2"])
    reference = Reference.of(config)
    assert distance(reference.weights[-1], reference.weights[0]) > 0.1
    assert final(federation).tobytes() == reference.weights[-1].tobytes()
    losses = [line["loss_max"] for line in federation.records("round")]
    assert losses == [round_losses.max() for round_losses in reference.losses]
    up = federation.summary()["communication"]["uplink"]
    # No coordinate was zero: a scale and 100 bits, 4 workers, 50 rounds; a loss beside each.
    assert up["payload_bytes_by_part"]["values"] == 4 * 50 * (4 + 13)
    assert up["payload_bytes_by_part"]["indices"] == 0
    assert up["float_equivalents"] == 4 * 50 * (1 + 100 / 32 + 1)


def test_the_dct_projection_both_ways_is_the_papers_algorithm_but_for_rounding(tmp_path: Path) -> None:
    config = config_of({"name": "dct-projection", "ratio": 0.2})
    federation = run_together(config, tmp_path / "run", ["0-1", "2-3"])
    reference = Reference.of(config)
    assert distance(reference.weights[-1], reference.weights[0]) > 0.1
    assert distance(final(federation), reference.weights[-1]) < TOLERANCE
    assert not federation.server.logged("digest_mismatch")
    up = federation.summary()["communication"]["uplink"]
    assert up["payload_bytes_by_part"]["values"] == 4 * 50 * 4 * 20


@pytest.mark.parametrize(
    "compressor",
    [
        {"name": "identity", "bits": 6},
        {"name": "rand-k", "ratio": 0.2, "bits": 4},
        {"name": "projection", "ratio": 0.2, "bits": 8},
        {"name": "dct-projection", "ratio": 0.2, "bits": 3},
    ],
    ids=lambda compressor: compressor["name"],
)
def test_integers_both_ways_are_the_papers_algorithm_to_the_bit(
    compressor: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(compressor)
    config["algorithm"]["rounds"] = 60
    federation = run_together(config, tmp_path / "run", ["1", "3", "0,2"])
    reference = Reference.of(config)
    assert distance(reference.weights[-1], reference.weights[0]) > 0.1
    assert final(federation).tobytes() == reference.weights[-1].tobytes()
    assert [line["loss_max"] for line in federation.records("round")] == [
        round_losses.max() for round_losses in reference.losses
    ]
    assert not federation.server.logged("digest_mismatch")
