"""What shared randomness, index coding and compression cost on one core, beside their floors.

python -m afl_benchmarks.codecs --dim 10000000
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from afl.core.codecs.indices import decode, encode
from afl.core.compressors import create
from afl.core.randomness import Purpose, SharedRandomness


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dim", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dim, repeats = options.dim, options.repeats
    randomness = SharedRandomness.from_int(1)
    vector = torch.from_numpy(
        (randomness.stream(Purpose.SYNTHETIC_DATA).uniform(dim) - 0.5).astype(np.float32)
    )
    copy = vector.clone()
    copy_ms = _median_ms(lambda: copy.copy_(vector), repeats)
    print(f"dim {dim}; one core; medians of {repeats}; copying the vector once takes {copy_ms:.1f} ms\n")
    print(f"{'what':34}{'k/d':>8}{'ms':>10}{'copies':>9}{'bits/index':>12}{'bound':>8}{'ratio':>7}")
    for ratio in (0.001, 0.01, 0.1, 0.3):
        count = max(1, round(ratio * dim))
        _row(
            "shared randomness: rand-k support",
            ratio,
            _median_ms(partial(_support, randomness, dim, count), repeats),
            copy_ms,
        )
        support = _support(randomness, dim, count)
        coded = encode(support, dim)
        bits = 8 * len(coded.data) / count
        bound = _entropy_bits(dim, count) / count
        _row(
            f"index encode ({coded.coding.name.lower()})",
            ratio,
            _median_ms(partial(encode, support, dim), repeats),
            copy_ms,
            f"{bits:12.3f}{bound:8.3f}{bits / bound:7.3f}",
        )
        _row(
            "index decode",
            ratio,
            _median_ms(partial(decode, coded.coding, coded.parameter, coded.data, count, dim), repeats),
            copy_ms,
        )
        for name in ("rand-k", "top-k"):
            compressor = create(name, dim, {"ratio": ratio})
            realization = compressor.realize(randomness.stream(Purpose.COMPRESSOR, 1))
            restore = partial(copy.copy_, vector)
            milliseconds = _median_ms(partial(realization.split, copy), repeats, before=restore)
            _row(f"compress ({name})", ratio, milliseconds, copy_ms)


def _row(what: str, ratio: float, milliseconds: float, copy_ms: float, more: str = "") -> None:
    print(f"{what:34}{ratio:8}{milliseconds:10.1f}{milliseconds / copy_ms:9.1f}{more}")


def _support(randomness: SharedRandomness, dim: int, count: int) -> NDArray[np.int64]:
    return randomness.stream(Purpose.COMPRESSOR, 1).subset(dim, count)


def _median_ms(
    action: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    seconds = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def _entropy_bits(dim: int, count: int) -> float:
    """``log2`` of the number of supports."""
    natural = math.lgamma(dim + 1) - math.lgamma(count + 1) - math.lgamma(dim - count + 1)
    return natural / math.log(2)


if __name__ == "__main__":
    main()
