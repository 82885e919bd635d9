"""Seeds as a person writes them."""

from __future__ import annotations

import re


def seeds_of(text: str) -> list[int]:
    """``1-5`` or ``1,4,9`` or both.

    Raises:
        ValueError: if it is neither, or names a seed twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is neither a seed nor a range of seeds such as 1-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= 10_000:
            raise ValueError(f"{part!r} is not a range of at most 10,000 seeds")
        seeds.extend(range(first, last + 1))
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{text!r} names a seed twice")
    return seeds
