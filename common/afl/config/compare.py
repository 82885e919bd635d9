"""Whether two configurations are of one run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from afl.config.schema import Config

_FREE: Final = frozenset(
    {
        "server",
        "run.directory",
        "run.description",
        "run.trackers",
        "faults.divergence",
        "faults.lost_residual",
        "faults.stragglers",
    }
)
"""What may change between the parts of a run: what only the server does, not what is computed."""


def differences(stored: Config, given: Config) -> list[str]:
    """What keeps ``given`` from going on with a run of ``stored``, a line each: key, stored and given value.

    A seed that is not given is the stored one.
    """
    one, other = dict(_flat(stored.model_dump(mode="json"))), dict(_flat(given.model_dump(mode="json")))
    if given.run.seed is None:
        other["run.seed"] = one["run.seed"]
    return [
        f"{key}: the run's is {_shown(one.get(key))}, given is {_shown(other.get(key))}"
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]


def _shown(value: Any) -> str:
    """As the configuration's file has it."""
    return json.dumps(value, ensure_ascii=False)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = prefix + name
        if key in _FREE:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value
