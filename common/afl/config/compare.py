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
    shown = partial(json.dumps, ensure_ascii=False)
    return [
        f"{key}: the run's is {shown(one.get(key))}, given is {shown(other.get(key))}"
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]


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
