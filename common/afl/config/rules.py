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
from afl.config.problems import Problem, nearest, shown
from afl.config.quantities import Duration, Size
from afl.core.algorithms.algorithm import KEYS, SHARED_OPTIONS, Algorithm, AlgorithmOption
from afl.core.algorithms.registry import algorithm_named, is_installed, users_of
from afl.errors import AddressError, ConfigError

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
    name = str(values.get("name"))
    about, problems = _about(name)
    if about is not None:
        problems += [*_unused(about, values), *_theory_of_others(about, values), *_own(about, values)]
        if "eta_q" in about.takes and values.get("eta_q") is None and "eta_q" in values:
            accepted = f"a step size on the dual weights; {name} needs it"
            problems.append(Problem(("eta_q",), "nothing", accepted))
    problems += [
        *_constant(values, step="eta_w", constant="smoothness", meaning="the smoothness constant L"),
        *_constant(
            values, step="eta_q", constant="sigma_q", meaning="the sub-Gaussian parameter of the loss"
        ),
    ]
    for direction in ("uplink", "downlink"):
        section = values.get(direction)
        if isinstance(section, Mapping) and (about is None or direction in about.takes):
            problems.extend(_within(direction, _compressor(section)))
    return problems


def own_options(name: str) -> tuple[AlgorithmOption, ...]:
    """The options that are an algorithm's own; none where the name is wrong, which the schema reports."""
    about, _ = _about(name)
    return () if about is None else about.options


def _about(name: str) -> tuple[Algorithm | None, list[Problem]]:
    """An installed algorithm, or why it cannot be used; neither where the name is wrong."""
    if not is_installed(name):
        return None, []
    try:
        return algorithm_named(name), []
    except ConfigError as error:
        return None, [Problem(("name",), shown(name), "an algorithm that can be loaded", note=str(error))]


def _own(about: Algorithm, values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with an algorithm's own options, and keys that are nobody's."""
    own = {option.name: option for option in about.options}
    keys = [*sorted(KEYS), *own]
    problems = [
        Problem(
            (key,), f"{shown(value)}, under an unknown key", f"one of {', '.join(keys)}", nearest(key, keys)
        )
        for key, value in values.items()
        if key not in keys
    ]
    for key, option in own.items():
        if key not in values and option.default is None:
            problems.append(Problem((key,), "nothing", f"{option.accepted}; {about.name} needs it"))
        elif key in values and not option.takes(values[key]):
            problems.append(Problem((key,), shown(values[key]), option.accepted))
    return problems


def _unused(about: Algorithm, values: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for option in sorted(SHARED_OPTIONS - about.takes):
        if values.get(option) is None:
            continue
        why = "does not use it"
        if option in {"uplink", "downlink"}:
            why = "does not compress; use afl-com"
        elif option in {"block", "local_steps"}:
            why += f"; {' and '.join(users_of(option))} do"
        problems.append(Problem((option,), shown(values[option]), f"no {option}; {about.name} {why}"))
    return problems


def _theory_of_others(about: Algorithm, values: Mapping[str, Any]) -> list[Problem]:
    """The theorems set the step sizes of AFL-BR and AFL-Com."""
    if about.has_theorems:
        return []
    accepted = f"a number; the theorems set step sizes for afl-br and afl-com, not {about.name}"
    return [
        Problem((step,), '"theory"', accepted)
        for step in ("eta_w", "eta_q")
        if values.get(step) == "theory" and (step == "eta_w" or step in about.takes)
    ]


def whole(values: Mapping[str, Any]) -> list[Problem]:
    """What sections demand of each other; the keys start at the top."""
    workers = values.get("workers")
    algorithm_, worker = (
        section if isinstance(section := values.get(name), Mapping) else {}
        for name in ("algorithm", "worker")
    )
    sampled, name = algorithm_.get("sampled"), str(algorithm_.get("name"))
    problems = []
    if type(sampled) is int and type(workers) is int and sampled > workers:
        problems.append(Problem(("algorithm", "sampled"), shown(sampled), f"at most workers ({workers})"))
    about, _ = _about(name)
    if worker.get("batch_oracles") is True and about is not None and "local_steps" in about.takes:
        accepted = f"false; {name} takes local steps, so its workers' gradients are at different models"
        problems.append(Problem(("worker", "batch_oracles"), "true", accepted))
    return problems


def faults(values: Mapping[str, Any]) -> list[Problem]:
    """A deadline and a quorum are for steps that do not wait; those need a deadline."""
    section = values.get("stragglers")
    if not isinstance(section, Mapping):
        return []
    policy, problems = section.get("policy", "wait"), []
    if policy == "skip" and section.get("deadline") is None:
        problems.append(Problem(("deadline",), "nothing", "a duration; policy: skip needs it"))
    if policy == "wait":
        for key in ("deadline", "quorum"):
            given = section.get(key)
            if given is not None:
                problems.append(Problem((key,), str(given), f"no {key}; only policy: skip uses it"))
    return _within("stragglers", problems)


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
    is_plain = values.get("tls") is None and listen is not None and not listen.is_loopback
    if values.get("tokens") is not None and is_plain:
        accepted = (
            f"no file, unless server.tls is set or server.listen ({listen}) is loopback; without TLS, tokens"
            " could be read by anyone in between"
        )
        problems.append(Problem(("tokens",), shown(str(values["tokens"])), accepted))
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
