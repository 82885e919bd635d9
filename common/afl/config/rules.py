"""What several keys demand of each other.

Each function takes a section's values as they were written, known to be right or not, and yields problems
whose keys start at that section. What is missing has its default. A value of the wrong type is passed over:
the schema reports it, and all problems are to be shown at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from afl.config.address import is_wildcard, listen_address
from afl.config.compressors import IDENTITY, compressor_problems, listed
from afl.config.problems import Problem, nearest, shown
from afl.config.quantities import Duration, Size
from afl.core.algorithms.algorithm import SHARED_OPTIONS, Algorithm
from afl.core.algorithms.registry import algorithm_named, is_installed, users_of
from afl.core.algorithms.settings import KL_RESTARTS
from afl.core.dual import DUAL_OPTIONS, DualRule, is_rule, rule_named, rule_names
from afl.core.messages import BIT_WIDTHS, BITS
from afl.core.options import AlgorithmOption
from afl.core.record_privacy import LEAST
from afl.core.rounds.policy import is_higher_better
from afl.errors import ConfigError

_T = TypeVar("_T")

LEAST_MASKED: Final = 2
"""Workers of a run with secure aggregation; a worker asks for more by itself (``--min-workers``)."""

ADVISED_MASKED_BITS: Final = 16
"""Bits with which each of hundreds of workers has as many values as float messages need."""

ROUNDED_TO_0: Final = 2.0**-150
"""The largest number that float32 rounds to 0: half of its smallest."""


def algorithm(values: Mapping[str, Any]) -> Iterator[Problem]:
    """An option that the algorithm or a step size does not use is refused; one that it needs is required."""
    name = str(values.get("name"))
    about = loaded(name)
    if about is not None:
        yield from _unused(about, values)
        dual = dual_name(values)
        rule = _loaded_rule(dual) if "dual" in about.takes else None
        has_theorems = about.has_theorems and (rule is None or rule.has_theorems)
        takes = taken(about, dual)
        for step in ("eta_w", "eta_q"):
            if values.get(step) == "theory" and not has_theorems and step in {"eta_w", *takes}:
                speak_not = f"dual.name: {dual}" if about.has_theorems else name
                accepted = f"a number; the theorems set step sizes for afl-br and afl-com, not {speak_not}"
                yield Problem((step,), '"theory"', accepted)
        yield from _options(name, about.options, values)
        if "eta_q" in takes and values.get("eta_q", 0) is None:
            yield Problem(("eta_q",), "nothing", f"a step size on the dual weights; {name} needs it")
        if rule is not None:
            yield from _dual(rule, values)
        elif "dual" in about.takes and is_rule(dual):
            yield from _not_loadable(("dual", "name"), dual, rule_named)
    elif is_installed(name):
        yield from _not_loadable(("name",), name, algorithm_named)
    eta_w = values.get("eta_w")
    if isinstance(eta_w, float) and 0 < eta_w <= ROUNDED_TO_0:
        accepted = "a number above 1e-45, since float32 rounds smaller ones to 0"
        yield Problem(("eta_w",), shown(eta_w), accepted)
    yield from _constant(values, "eta_w", "smoothness", "the smoothness constant L")
    yield from _constant(values, "eta_q", "sigma_q", "the sub-Gaussian parameter of the loss")
    for direction in ("uplink", "downlink"):
        if about is None or direction in about.takes:
            yield from _compressor(direction, values.get(direction))
    yield from _pair(values.get("uplink"), values.get("downlink"))
    yield from _schedule(values.get("schedule"), values.get("rounds"))
    yield from _optimizer(values.get("optimizer"))
    is_adam = isinstance(own := values.get("optimizer"), Mapping) and own.get("name") == "adam"
    if is_adam and about is not None and "server_eta" in about.takes and values.get("server_eta") is None:
        accepted = "a step size of the server, about how far a parameter moves in a round, such as 0.01"
        yield Problem(("server_eta",), "nothing", accepted)


def _not_loadable(key: tuple[str, ...], name: str, load: Callable[[str], object]) -> Iterator[Problem]:
    try:
        load(name)
    except ConfigError as error:
        what = "an algorithm" if key == ("name",) else "a dual rule"
        yield Problem(key, shown(name), f"{what} that can be loaded", note=str(error))


def taken(about: Algorithm, dual: str) -> frozenset[str]:
    """The shared options that an algorithm uses with a dual rule of that name."""
    rule = _loaded_rule(dual) if "dual" in about.takes else None
    return about.takes if rule is None else about.takes - (DUAL_OPTIONS - rule.takes)


def dual_name(values: Mapping[str, Any]) -> str:
    """The name of the dual rule, from the values of the section ``algorithm``."""
    section = values.get("dual")
    return str(section.get("name", KL_RESTARTS)) if isinstance(section, Mapping) else KL_RESTARTS


def _loaded_rule(name: str) -> type[DualRule] | None:
    try:
        return rule_named(name)
    except ConfigError:
        return None


def _options(
    owner: str, options: Sequence[AlgorithmOption], values: Mapping[str, Any], section: tuple[str, ...] = ()
) -> Iterator[Problem]:
    for option in options:
        value = values.get(option.name, option.default)
        if value is None and option.name not in values:
            yield Problem((*section, option.name), "nothing", f"{option.accepted}; {owner} needs it")
        elif not option.takes(value):
            yield Problem((*section, option.name), shown(value), option.accepted)


def _dual(rule: type[DualRule], values: Mapping[str, Any]) -> Iterator[Problem]:
    """The rule's own options, and a schedule of a step size that it has."""
    section = values.get("dual")
    given = section if isinstance(section, Mapping) else {}
    yield from _options(rule.name, rule.options, given, ("dual",))
    known = ["name", *(option.name for option in rule.options)]
    for key in given.keys() - known:
        found = f"{shown(given[key])}, under a key that {rule.name} does not take"
        accepted = f"only {listed(known)} with {rule.name}"
        yield Problem(("dual", key), found, accepted, nearest=nearest(key, known))
    schedule = values.get("schedule")
    if isinstance(schedule, Mapping) and schedule.get("eta_q") is True and "eta_q" not in rule.takes:
        accepted = f"false; the dual rule {rule.name} has no step size"
        yield Problem(("schedule", "eta_q"), "true", accepted)


def loaded(name: str) -> Algorithm | None:
    """The algorithm of a name; None where it is not installed or cannot be loaded."""
    try:
        return algorithm_named(name)
    except ConfigError:
        return None


def server(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Times, sizes and addresses fit each other."""
    heartbeat, peer_timeout = (_read(Duration, values[key]) for key in ("heartbeat", "peer_timeout"))
    if heartbeat is not None and peer_timeout is not None and peer_timeout < 2 * heartbeat:
        accepted = (
            f"at least twice server.heartbeat ({heartbeat}), so that one late heartbeat ends no session"
        )
        yield Problem(("peer_timeout",), str(peer_timeout), accepted)
    chunk, buffer = (_read(Size, values[key]) for key in ("chunk_bytes", "reorder_buffer"))
    if chunk is not None and buffer is not None and buffer < chunk:
        yield Problem(("reorder_buffer",), str(buffer), f"at least server.chunk_bytes ({chunk})")
    listen, http = (_read(listen_address, values[key]) for key in ("listen", "http"))
    tls = values.get("tls")
    if isinstance(tls, Mapping) and tls.get("revoked") is not None and tls.get("client_ca") is None:
        accepted = "no file, unless server.tls.client_ca is set: no certificate is asked for"
        yield Problem(("tls", "revoked"), shown(str(tls["revoked"])), accepted)
    if values.get("integrity_key") is not None and values.get("state") == "off":
        accepted = "no file, unless server.state is process or machine: nothing is written that it could seal"
        yield Problem(("integrity_key",), shown(str(values["integrity_key"])), accepted)
    for one, other in (("http_certificate", "http_key"), ("http_key", "http_certificate")):
        if values.get(one) is not None and values.get(other) is None:
            yield Problem((other,), "nothing", f"a file, since server.{one} is set")
    if listen is None:
        return
    if http is not None and http.port == listen.port != 0:
        hosts = {listen.host, http.host}
        if len(hosts) == 1 or any(map(is_wildcard, hosts)):
            accepted = f"an address other than server.listen ({listen}), or null (off)"
            yield Problem(("http",), str(http), accepted)
    if values.get("tokens") is not None and values.get("tls") is None and not listen.is_loopback:
        accepted = (
            f"no file, unless server.tls is set or server.listen ({listen}) is loopback; without TLS, tokens"
            " could be read by anyone in between"
        )
        yield Problem(("tokens",), shown(str(values["tokens"])), accepted)


def faults(values: Mapping[str, Any]) -> Iterator[Problem]:
    """A deadline and a quorum are for steps that do not wait; those need a deadline."""
    section = values.get("stragglers")
    if not isinstance(section, Mapping):
        return
    policy = section.get("policy", "wait")
    if policy == "skip" and section.get("deadline") is None:
        yield Problem(("stragglers", "deadline"), "nothing", "a duration; policy: skip needs it")
    if policy == "wait":
        for key in ("deadline", "quorum"):
            if section.get(key) is not None:
                yield Problem(("stragglers", key), str(section[key]), f"no {key}; only policy: skip uses it")


def evaluation(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Which end of the ranking metric is better is known, or said."""
    rank_by, better = values.get("rank_by"), values.get("better")
    if rank_by is None and better is not None:
        yield Problem(("better",), shown(better), "nothing, unless evaluation.rank_by names a metric")
    if isinstance(rank_by, str) and better is None and is_higher_better(rank_by) is None:
        yield Problem(("better",), "nothing", f"higher or lower: whether more {rank_by} is better")


def whole(values: Mapping[str, Any]) -> Iterator[Problem]:
    """What sections demand of each other; the keys start at the top."""
    workers = values.get("workers")
    algorithm_ = section if isinstance(section := values.get("algorithm"), Mapping) else {}
    sites = values.get("sites")
    if isinstance(sites, list) and type(workers) is int and len(sites) != workers:
        yield Problem(
            ("sites",), f"{len(sites)} names", f"{workers} names, one for each of workers ({workers})"
        )
    sampled, name = algorithm_.get("sampled"), str(algorithm_.get("name"))
    if type(sampled) is int and type(workers) is int and sampled > workers:
        yield Problem(("algorithm", "sampled"), shown(sampled), f"at most workers ({workers})")
    largest = algorithm_.get("largest_weight")
    if isinstance(largest, int | float) and type(workers) is int and 0 < largest * workers <= 1:
        accepted = (
            f"above 1 / workers ({1 / workers:.4g}), or null: weights that sum to 1 are not all smaller"
        )
        yield Problem(("algorithm", "largest_weight"), shown(largest), accepted)
    about = loaded(name)
    task = section if isinstance(section := values.get("task"), Mapping) else {}
    if algorithm_.get("dual_loss") == "held-out" and task.get("held_out", 0) == 0:
        accepted = "a share such as 0.2; algorithm.dual_loss: held-out needs it"
        yield Problem(("task", "held_out"), shown(task.get("held_out", 0)), accepted)
    yield from _privacy(values, workers, algorithm_, about)
    yield from _records(values, algorithm_, about)
    yield from _patience(values)
    faults_, privacy = (
        section if isinstance(section := values.get(name), Mapping) else {} for name in ("faults", "privacy")
    )
    if (cap := faults_.get("loss_cap")) is not None:
        if about is not None and "eta_q" not in about.takes:
            accepted = f"no loss_cap; {name} has no dual weights"
            yield Problem(("faults", "loss_cap"), shown(cap), accepted)
        elif privacy.get("losses") == "hidden":
            accepted = "no loss_cap; with losses: hidden the server sees no loss of its own"
            yield Problem(("faults", "loss_cap"), shown(cap), accepted)
    if faults_.get("update_norm") is not None:
        if about is not None and ("local_steps" in about.takes):
            accepted = f"no update_norm; workers of {name} send models, not updates"
            yield Problem(("faults", "update_norm"), "a section", accepted)
        elif privacy.get("secure_aggregation") is True:
            accepted = "no update_norm; with secure_aggregation the server sees no single update"
            yield Problem(("faults", "update_norm"), "a section", accepted)


def _patience(values: Mapping[str, Any]) -> Iterator[Problem]:
    evaluation, task, privacy = (
        section if isinstance(section := values.get(name), Mapping) else {}
        for name in ("evaluation", "task", "privacy")
    )
    patience = evaluation.get("patience")
    if patience is None:
        return
    if task.get("held_out", 0) == 0:
        accepted = "a share such as 0.2; evaluation.patience needs it"
        yield Problem(("task", "held_out"), shown(task.get("held_out", 0)), accepted)
    if privacy.get("losses") == "hidden":
        accepted = "no patience; with losses: hidden nobody knows the worst site's loss"
        yield Problem(("evaluation", "patience"), shown(patience), accepted)


RULES: Final[Mapping[str, Callable[[Mapping[str, Any]], Iterator[Problem]]]] = {
    "algorithm": algorithm,
    "evaluation": evaluation,
    "server": server,
    "faults": faults,
    "config": whole,
}
"""By section; ``config`` is the whole."""


def _privacy(
    values: Mapping[str, Any], workers: object, algorithm_: Mapping[str, Any], about: Algorithm | None
) -> Iterator[Problem]:
    """Masks are added to integers, and cancel in the sum of all workers' messages only."""
    section = values.get("privacy")
    privacy: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    key = ("privacy", "secure_aggregation")
    if privacy.get(key[1]) is not True:
        if privacy.get("losses") == "hidden":
            yield Problem(key, "false", "true; losses: hidden needs masks")
        return
    if about is not None and "uplink" not in about.takes:
        yield Problem(key, "true", f"false; masks are added to integers, which {about.name} does not send")
        return
    rule = _loaded_rule(dual_name(algorithm_))
    if privacy.get("losses") == "hidden" and rule is not None and not rule.can_hide:
        can = listed([one for one in rule_names() if (own := _loaded_rule(one)) and own.can_hide])
        accepted = f"one of {can}; with losses: hidden each worker knows its own weight alone"
        yield Problem(("algorithm", "dual", "name"), rule.name, accepted)
    if privacy.get("losses") == "hidden" and algorithm_.get("largest_weight") is not None:
        accepted = "no largest_weight; with losses: hidden nobody knows all dual weights"
        yield Problem(("algorithm", "largest_weight"), shown(algorithm_["largest_weight"]), accepted)
    uplink = algorithm_.get("uplink")
    bits = uplink.get(BITS) if isinstance(uplink, Mapping) else None
    if bits is None:
        accepted = f"{ADVISED_MASKED_BITS}, say: masks are added to integers"
        yield Problem(("algorithm", "uplink", BITS), "nothing", accepted)
    elif type(bits) is int and type(workers) is int and bits in BIT_WIDTHS and bits < least_bits(workers):
        accepted = (
            f"at least {least_bits(workers)}, better {ADVISED_MASKED_BITS}: under masks, they hold the sum "
            f"of {workers} workers' integers"
        )
        yield Problem(("algorithm", "uplink", BITS), shown(bits), accepted)
    if type(workers) is int and workers < LEAST_MASKED:
        yield Problem(("workers",), shown(workers), f"at least {LEAST_MASKED}: a sum of one hides nothing")
    faults_ = values.get("faults")
    faults_ = faults_ if isinstance(faults_, Mapping) else {}
    stragglers = faults_.get("stragglers")
    why = "with secure_aggregation a sum can be read only when nobody is missing"
    if isinstance(stragglers, Mapping) and stragglers.get("policy") == "skip":
        yield Problem(("faults", "stragglers", "policy"), "skip", f"wait; {why}")
    if faults_.get("non_finite") == "skip":
        yield Problem(("faults", "non_finite"), "skip", f"abort; {why}")


def _records(
    values: Mapping[str, Any], algorithm_: Mapping[str, Any], about: Algorithm | None
) -> Iterator[Problem]:
    """Either noise or epsilon; and nothing beside that tells of training records without noise, or anew."""
    privacy, task, worker = (
        section if isinstance(section := values.get(name), Mapping) else {}
        for name in ("privacy", "task", "worker")
    )
    records = privacy.get("records")
    if not isinstance(records, Mapping):
        return
    key = ("privacy", "records")
    noise, epsilon = (records.get(name) for name in ("noise", "epsilon"))
    if noise is None and epsilon is None:
        accepted = "a number, such as 1.1; or epsilon in its place, such as 8: the noise is then computed"
        yield Problem((*key, "noise"), "nothing", accepted)
    if epsilon is not None:
        for name in ("noise", "loss_noise"):
            if records.get(name) is not None:
                accepted = f"no {name}; the noise follows from epsilon"
                yield Problem((*key, name), shown(records[name]), accepted)
    for name in ("clip", "loss_clip", "noise", "loss_noise"):
        value = records.get(name)
        if isinstance(value, float) and 0 < value < LEAST:
            yield Problem((*key, name), shown(value), f"at least {LEAST:g}")
    if about is not None and "local_steps" in about.takes:
        accepted = f"no section; {about.name} takes local steps, which are not accounted for"
        yield Problem(key, "a section", accepted)
    if algorithm_.get("clip_norm") is not None:
        accepted = "no clip_norm; privacy.records.clip shortens each record's gradient"
        yield Problem(("algorithm", "clip_norm"), shown(algorithm_["clip_norm"]), accepted)
    if task.get("held_out", 0) != 0:
        accepted = "0; evaluations tell the metrics of held-out records, which privacy.records protects too"
        yield Problem(("task", "held_out"), shown(task["held_out"]), accepted)
    if worker.get("journal", "process") != "machine":
        accepted = (
            "machine: with privacy.records, what was sent is sent again after a power failure, not drawn anew"
        )
        yield Problem(("worker", "journal"), shown(worker.get("journal", "process")), accepted)
    if worker.get("batch_oracles") is True:
        accepted = "false; with privacy.records each worker's gradients are taken record by record"
        yield Problem(("worker", "batch_oracles"), "true", accepted)


def least_bits(workers: int) -> int:
    """The fewest bits that hold the sum of integers from -1 to 1 of so many workers."""
    return workers.bit_length() + 1


def _unused(about: Algorithm, values: Mapping[str, Any]) -> Iterator[Problem]:
    dual = dual_name(values)
    for option in sorted(SHARED_OPTIONS - taken(about, dual)):
        if values.get(option) is None:
            continue
        if option in about.takes:
            accepted = f"no {option}; the dual rule {dual} does not use it"
            yield Problem((option,), shown(values[option]), accepted)
            continue
        why = "does not use it"
        if option in {"dual", "dual_loss"} and "eta_q" not in about.takes:
            why += "; it has no dual weights"
        elif option in {"uplink", "downlink"}:
            why = "does not compress; use afl-com"
        elif option in {"block", "local_steps", "optimizer"}:
            why += ", since its workers take local steps of SGD" * (option == "optimizer")
            *users, last = users_of(option)
            why += f"; {', '.join(users)} and {last} do"
        yield Problem((option,), shown(values[option]), f"no {option}; {about.name} {why}")


def _compressor(direction: str, section: object) -> Iterator[Problem]:
    if isinstance(section, Mapping) and isinstance(name := section.get("name", IDENTITY), str):
        options = {key: value for key, value in section.items() if key != "name"}
        for problem in compressor_problems(name, options):
            yield replace(problem, key=(direction, *problem.key))


SCHEDULE_KEYS: Final = {"final": ("cosine",), "at": ("steps",), "factor": ("steps",)}
OPTIMIZER_KEYS: Final = {"beta_1": ("momentum", "adam"), "beta_2": ("adam",), "epsilon": ("adam",)}
"""Which values of ``then``, or which optimizers, use a key."""


def used(values: Mapping[str, Any], kind: str, users: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The values without those of keys that ``kind`` does not use."""
    return {key: value for key, value in values.items() if kind in users.get(key, (kind,))}


def _of_kind(
    section: str, values: Mapping[str, Any], by: str, kind: object, users: Mapping[str, tuple[str, ...]]
) -> Iterator[Problem]:
    for key, kinds in users.items():
        if values.get(key) is not None and kind not in kinds:
            accepted = f"no {key}; only {by}: {' and '.join(kinds)} use{'s' * (len(kinds) == 1)} it"
            yield Problem((section, key), shown(values[key]), accepted)


def _optimizer(section: object) -> Iterator[Problem]:
    if isinstance(section, Mapping):
        yield from _of_kind("optimizer", section, "name", section.get("name", "sgd"), OPTIMIZER_KEYS)


def _schedule(section: object, rounds: object) -> Iterator[Problem]:
    if not isinstance(section, Mapping):
        return
    then, warm_up, at = section.get("then", "constant"), section.get("warm_up", 0), section.get("at")
    yield from _of_kind("schedule", section, "then", then, SCHEDULE_KEYS)
    if type(warm_up) is int and type(rounds) is int and warm_up >= rounds:
        yield Problem(("schedule", "warm_up"), shown(warm_up), f"less than algorithm.rounds ({rounds})")
    if then == "steps" and at is None:
        accepted = "a list of rounds, such as [1000, 1500]; then: steps needs it"
        yield Problem(("schedule", "at"), "nothing", accepted)
    if isinstance(at, list) and all(type(round_) is int for round_ in at):
        least = warm_up if type(warm_up) is int else 0
        if at != sorted({*at}) or (at and at[0] < least):
            accepted = "a list of rounds, ascending, none of them in the warm-up"
            yield Problem(("schedule", "at"), shown(at), accepted)


def _pair(up: object, down: object) -> Iterator[Problem]:
    if not (isinstance(up, Mapping) and isinstance(down, Mapping)) or up.get(BITS) is None:
        return
    if {"name": IDENTITY, **down} != {"name": IDENTITY, **up}:
        accepted = f"no downlink, or the same as uplink: with {BITS} up, the sum of the integers goes down"
        yield Problem(("downlink",), shown(down), accepted)


def _constant(values: Mapping[str, Any], step: str, constant: str, meaning: str) -> Iterator[Problem]:
    given, is_theory = values.get(constant), values.get(step) == "theory"
    if is_theory and given is None:
        yield Problem((constant,), "nothing", f"a number, {meaning}; {step}: theory needs it")
    if given is not None and not is_theory and step in values:
        yield Problem((constant,), shown(given), f"no {constant}; only {step}: theory uses it")


def _read(kind: Callable[[object], _T], value: object) -> _T | None:
    """The value as ``kind`` reads it; None if it cannot."""
    try:
        return kind(value)
    except ValueError:
        return None
