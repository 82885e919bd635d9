"""Which version of afl began a run, and which others went on with it: the file ``versions.json`` of its
directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from afl.errors import DataError
from afl.outside import words
from afl.paths import read_plain
from afl.runs.durable import write_whole

VERSIONS_FILE = "versions.json"

UNKNOWN = "unknown"
"""That of a server which wrote no such file."""


@dataclass(frozen=True)
class Version:
    """A server's version.

    Attributes:
        round: the last update round that was closed when it took over.
        arithmetic: a digest of what it computes of fixed numbers, in hexadecimal; empty where it wrote none.
    """

    version: str
    round: int
    arithmetic: str = ""


def read_versions(directory: Path) -> list[Version]:
    """The versions of the run in ``directory``, in order.

    Raises:
        DataError: if the file is damaged or cannot be read.
    """
    path = directory / VERSIONS_FILE
    try:
        entries = json.loads(read_plain(path))
        # A run has at least one.
        first, *later = (
            Version(
                words(str(entry["version"])), int(entry["round"]), words(str(entry.get("arithmetic", "")))
            )
            for entry in entries
        )
    except FileNotFoundError:
        return [Version(UNKNOWN, 0)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); put it back from a backup, or remove it: it only says which "
            "versions of afl the run has had"
        ) from error
    return [first, *later]


def write_versions(directory: Path, versions: Sequence[Version]) -> None:
    """Replace the file, whole or not at all. An ``OSError`` if it cannot be written."""
    write_whole(directory / VERSIONS_FILE, json.dumps(list(map(asdict, versions))).encode() + b"\n")


def shown_versions(versions: Sequence[Version]) -> str:
    """``0.2.0, 0.3.0 after round 12``."""
    first, *others = versions
    return ", ".join([first.version, *(f"{each.version} after round {each.round}" for each in others)])
