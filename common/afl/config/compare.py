"""Whether two configurations are of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from afl.config.schema import Config

_FREE: Final = (
    "server.",
    "sites.",
    "run.directory.",
    "run.description.",
    "run.trackers.",
    "faults.divergence.",
    "faults.lost_residual.",
    "faults.stragglers.",
)
"""What may change between the parts of a run: what only the server does, not what is computed."""

_ACCESS: Final = ("server.tls", "server.tokens", "server.insecure", "server.http_", "server.integrity_key")


def differences(stored: Config, given: Config) -> list[str]:
    """What keeps ``given`` from going on with a run of ``stored``, a line each: key, stored and given value.

    A seed that is not given is the stored one.
    """
    one, other = _defining(stored), _defining(given)
    if given.run.seed is None:
        other["run.seed"] = one["run.seed"]
    return [f"{key}: the run's is {mine}, given is {its}" for key, mine, its in unlike(one, other)]


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The keys under which two mappings have not the same, with both values as JSON, in which 1 is not 1.0: a
    task may see a count in one and a share in the other."""
    shown = partial(json.dumps, ensure_ascii=False, sort_keys=True)
    for key in sorted(one.keys() | other.keys()):
        mine, its = shown(one.get(key)), shown(other.get(key))
        if mine != its or (key in one) != (key in other):
            yield key, mine, its


def access_keys(config: Config) -> dict[str, Any]:
    """Who may speak with a server and read its pages: the keys that are not off, by their dotted names."""
    values = flat(config.model_dump(mode="json"))
    return {key: value for key, value in values if key.startswith(_ACCESS) and value}


def _defining(config: Config) -> dict[str, Any]:
    return {
        key: value for key, value in flat(config.model_dump(mode="json")) if not f"{key}.".startswith(_FREE)
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value by its dotted key: ``algorithm.eta_w``."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
