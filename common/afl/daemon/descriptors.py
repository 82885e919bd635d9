"""File descriptors: peers take those that are theirs to take, never those that a run's files need."""

from __future__ import annotations

import errno
import resource
from typing import Final

KEPT: Final = 96  # for files, logs, event loops, trackers and what listens
HTTP_SHARE: Final = 8  # one descriptor in so many may be a connection to pages: 128 of the customary 1024
# Where the limit is so low that nothing is left after all others, one in so many is a connection of gRPC.
FEW: Final = 4
# How the operating system says that the process, or the machine, has no descriptor left.
SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE})


def most_descriptors() -> int:
    """How many the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def raise_limit() -> int:
    """Allow the process as many descriptors as the machine's administrator does; how many that is."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return most_descriptors()


def most_pages(limit: int) -> int:
    """How many of ``limit`` descriptors may be connections to pages over HTTP."""
    return max(1, limit // HTTP_SHARE)


def most_connections(limit: int) -> int:
    """How many of ``limit`` descriptors may be connections of gRPC."""
    return max(1, limit // FEW, limit - most_pages(limit) - KEPT)


def is_short(error: BaseException | None) -> bool:
    """Whether a file could not be opened only because there was no descriptor for it."""
    if isinstance(error, OSError):
        return error.errno in SHORT
    # The library that writes models has no numbers in its errors.
    return any(f"os error {number})" in str(error) for number in SHORT)
