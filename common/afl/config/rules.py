"""What several keys demand of each other.

Each function takes a section's values as they were written, known to be right or not, and returns problems
whose keys start at that section. What is missing has its default. A value of the wrong type is passed over:
the schema reports it, and all problems are to be shown at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic_core import PydanticCustomError

from afl.config.address import Address, is_wildcard, parse_listen
from afl.config.compressors import IDENTITY, compressor_problems
from afl.config.problems import Problem, shown
from afl.config.quantities import Duration, Size
from afl.errors import AddressError

_T = TypeVar("_T")

BROKEN_RULE: Final = "broken_rule"
"""The pydantic error type under which a model reports broken rules."""


def require(problems: Sequence[Problem]) -> None:
    """Make a pydantic validation fail if there are problems.

    Raises:
        PydanticCustomError: with all of them in its message.
    """
    if problems:
        raise PydanticCustomError(BROKEN_RULE, "{problems}", {"problems": "; ".join(map(str, problems))})


def algorithm(values: Mapping[str, Any]) -> list[Problem]:
    """An option that the algorithm or a step size does not use is refused; one that it needs is required."""
    problems = [
        *_constant(values, step="eta_w", constant="smoothness", meaning="the smoothness constant L"),
        *_constant(
            values, step="eta_q", constant="sigma_q", meaning="the sub-Gaussian parameter of the loss"
        ),
    ]
    for direction in ("uplink", "downlink"):
        section = values.get(direction)
        if section is None:
            continue
        if values.get("name") == "afl-br":
            accepted = f"no {direction}; afl-br does not compress; use afl-com"
            problems.append(Problem((direction,), shown(section), accepted))
        elif isinstance(section, Mapping):
            problems.extend(_within(direction, _compressor(section)))
    return problems


def server(values: Mapping[str, Any]) -> list[Problem]:
    """Times, sizes and addresses fit each other."""
    problems = []
    heartbeat, peer_timeout = (_read(Duration, values[key]) for key in ("heartbeat", "peer_timeout"))
    if heartbeat is not None and peer_timeout is not None and peer_timeout < 2 * heartbeat:
        accepted = (
            f"at least twice server.heartbeat ({heartbeat}), so that one late heartbeat ends no session"
        )
        problems.append(Problem(("peer_timeout",), str(peer_timeout), accepted))
    chunk, buffer = (_read(Size, values[key]) for key in ("chunk_bytes", "reorder_buffer"))
    if chunk is not None and buffer is not None and buffer < chunk:
        problems.append(Problem(("reorder_buffer",), str(buffer), f"at least server.chunk_bytes ({chunk})"))
    listen, http = (_read(_address, values[key]) for key in ("listen", "http"))
    if listen is not None and http is not None and http.port == listen.port != 0:
        hosts = {listen.host, http.host}
        if len(hosts) == 1 or any(is_wildcard(host) for host in hosts):
            accepted = f"an address other than server.listen ({listen}), or null (off)"
            problems.append(Problem(("http",), str(http), accepted))
    return problems


def _read(kind: Callable[[object], _T], value: object) -> _T | None:
    """The value as ``kind`` reads it; None if it cannot."""
    try:
        return kind(value)
    except (ValueError, AddressError):
        return None


def _address(value: object) -> Address:
    return value if isinstance(value, Address) else parse_listen(str(value))


def _constant(values: Mapping[str, Any], *, step: str, constant: str, meaning: str) -> list[Problem]:
    given = values.get(constant)
    is_theory = values.get(step) == "theory"
    if is_theory and given is None:
        return [Problem((constant,), "nothing", f"a number, {meaning}; {step}: theory needs it")]
    if given is not None and not is_theory and step in values:
        return [Problem((constant,), shown(given), f"no {constant}; only {step}: theory uses it")]
    return []


def _compressor(section: Mapping[str, Any]) -> list[Problem]:
    name = section.get("name", IDENTITY)
    if not isinstance(name, str):
        return []
    return compressor_problems(name, {key: value for key, value in section.items() if key != "name"})


def _within(section: str, problems: Sequence[Problem]) -> list[Problem]:
    return [
        Problem((section, *problem.key), problem.found, problem.accepted, problem.nearest, problem.note)
        for problem in problems
    ]
