"""Makes the data of three hospitals in the folder ``data``: `python make_data.py [SEED]`.

They have 300, 3,000 and 12,000 records of 20 measurements (float32, roughly standard normal) and an outcome
(0 or 1, about half each), to train with, and 1,000 later records each, to test with. Hospitals 1 and 2 have
the same causes. Hospital 0 treats other patients, whose outcomes have other, mostly opposite causes.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIZES = (300, 3_000, 12_000)
LATER = 1_000
MEASUREMENTS = 20


def hospital(
    site: int, seed: int = 0, records: int | None = None
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """So many records of one hospital, and later ones: x, ``[n, 20]``, and y, ``[n]``."""
    causes = np.random.default_rng([seed, len(SIZES)])  # the same at all hospitals
    weights = causes.normal(size=MEASUREMENTS)
    rng = np.random.default_rng([seed, site])
    x = rng.normal(size=((records or SIZES[site]) + LATER, MEASUREMENTS))
    if site == 0:
        weights = causes.normal(size=MEASUREMENTS) - weights
        x[:, :4] += 0.7  # older patients, for instance
    scores = x @ weights / np.linalg.norm(weights) + 0.5 * x[:, 4] * x[:, 5]
    risk = 1 / (1 + np.exp(-2.0 * (scores - np.median(scores))))
    return x.astype(np.float32), (rng.random(len(x)) < risk).astype(np.int64)


def main() -> None:
    """Write ``data/site-0.npz`` and so on."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    Path("data").mkdir(exist_ok=True)
    for site in range(len(SIZES)):
        x, y = hospital(site, seed)
        np.savez(f"data/site-{site}.npz", x=x, y=y)


if __name__ == "__main__":
    main()
