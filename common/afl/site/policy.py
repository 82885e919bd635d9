"""A site's policy: what no server can override.

A run's settings, as a worker is sent them, are held against it before anything is sent, and whenever they are
taken anew. What the server may leave unsaid or lie about is bounded elsewhere: the worker counts the rounds
that it answers, and draws its minibatches itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from afl.config.address import Address, parse_target
from afl.config.describe import Accepts, Null, OneOf, Unit
from afl.config.load import load_section
from afl.config.problems import KeyPath, Problem, shown
from afl.config.schema import Count, Name, PathName, Privacy, Section, installed_algorithm
from afl.core.algorithms.registry import algorithm_names
from afl.core.record_privacy import RecordPrivacy
from afl.errors import AddressError, PolicyError
from afl.security.certificates import pem_certificates
from afl.user_code import as_module_path

if TYPE_CHECKING:
    from afl.wire.settings import RunSettings

DEFAULT_MIN_BATCH: Final = 8
"""Examples. From the gradient of one, and with layers made for it of a few, an input can be read exactly."""

ANY: Final = "any"

_TASKS: Final = (
    "a section of task names, each with the options that a run may set: a section of option names, each with"
    " a list of values or any; or any, for all options"
)


def _target(value: object) -> Address:
    if isinstance(value, Address):
        return value
    try:
        return parse_target(str(value))
    except AddressError as error:
        raise ValueError(str(error)) from error


def _fingerprint(text: str) -> str:
    digits = text.lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch("[0-9a-f]{64}", digits, re.ASCII):
        raise ValueError("a SHA-256 fingerprint has 64 hexadecimal digits, with or without colons")
    return digits


_Target: TypeAlias = Annotated[Address, PlainValidator(_target), PlainSerializer(str, return_type=str)]
_Names: TypeAlias = list[Annotated[Name, AfterValidator(installed_algorithm)]]
_Share: TypeAlias = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Policy(Section):
    """What a site allows."""

    servers: Annotated[
        list[_Target] | None, Accepts("a list of host:port, as --server has them"), Null("any")
    ] = None
    """the servers that this site connects to"""
    authorities: Annotated[
        list[Annotated[str, AfterValidator(_fingerprint)]] | None,
        Accepts("a list of SHA-256 fingerprints, as openssl x509 -fingerprint -sha256 prints them"),
        Null("any, or none"),
    ] = None
    """whose signature a server's certificate must have: all certificates in --ca must be among these, and
    plaintext is refused"""
    tasks: Annotated[dict[str, Any] | None, Accepts(_TASKS), Null("any")] = None
    """the tasks that run here, and the options that the server may set; any other must be at its default"""
    algorithms: Annotated[
        _Names | None, Accepts("a list of installed algorithms"), OneOf(algorithm_names), Null("any")
    ] = None
    """the algorithms that run here"""
    min_workers: Annotated[Count | None, Unit("workers"), Null("any number")] = None
    """the fewest workers a federation may have, by the server's word"""
    max_rounds: Annotated[Count | None, Unit("rounds"), Null("any number")] = None
    """the most rounds of a run; also the most that one worker answers in it, whatever the server says"""
    min_batch: Annotated[Count | None, Unit("examples"), Null("that of --min-batch")] = None
    """the smallest minibatch that a gradient may be of; of a worker with fewer examples, all of them"""
    secure_aggregation: Literal["required", "optional"] = "optional"
    """whether the server may learn no more than the sum of all workers' messages"""
    losses: Literal["shown", "hidden"] = "shown"
    """whether the server may learn this site's losses, or they must be hidden"""
    metrics: Literal["shown", "hidden"] = "shown"
    """whether the server may learn what evaluations give here, or that must be hidden"""
    epsilon: Annotated[
        Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None,
        Null("no record-level privacy asked"),
    ] = None
    """the largest privacy loss of a record that a run may state; a run that states none is refused"""
    delta: Annotated[_Share | None, Null("with epsilon only")] = None
    """the largest delta that this epsilon may be stated for"""
    audit: Annotated[PathName | None, Null("none is written")] = None
    """the log of what left the site, added to and never written over"""


def _broken_rules(values: Mapping[str, Any]) -> Iterator[Problem]:
    for key, other in (("epsilon", "delta"), ("delta", "epsilon")):
        if values.get(key) is not None and values.get(other) is None:
            yield Problem((other,), "nothing", f"a number; {key} needs it")
    tasks = values.get("tasks")
    for name, options in tasks.items() if isinstance(tasks, dict) else ():
        if isinstance(options, dict):
            for key, value in options.items():
                if value != ANY and not isinstance(value, list):
                    yield Problem(("tasks", name, key), shown(value), f"a list of values, or {ANY}")
        elif options not in (None, ANY):
            yield Problem(("tasks", name), shown(options), f"a section of options, or {ANY}")


@dataclass(frozen=True)
class Disclosure:
    """What a run states of what the server learns of a site."""

    privacy: Privacy
    records: RecordPrivacy | None = None
    """What protects each record; ``None`` where nothing does."""

    @property
    def metrics(self) -> str:
        """Single metrics would tell what hidden losses do not."""
        return self.privacy.losses


def disclosed(settings: RunSettings) -> Disclosure:
    """What the run's settings state: the one place that reads it."""
    run = settings.parameters
    losses: Literal["shown", "hidden"] = "hidden" if run.hides_losses else "shown"
    return Disclosure(Privacy(secure_aggregation=run.secure_aggregation, losses=losses), run.records)


@dataclass(frozen=True)
class Demand:
    """What a policy says of one thing, and what a run has of it."""

    key: KeyPath
    allowed: str
    found: str
    is_met: bool
    where: str = ""
    """``file:line``, or the option."""


@dataclass(frozen=True)
class SitePolicy:
    """A policy with the places of its lines. The default allows everything."""

    limits: Policy = field(default_factory=Policy)
    places: Mapping[KeyPath, str] = field(default_factory=dict)
    min_batch: int = 1
    """What counts where the file says nothing."""

    @classmethod
    def load(cls, path: Path, min_batch: int = DEFAULT_MIN_BATCH) -> SitePolicy:
        """The policy in a YAML file. Raises InvalidConfigError with every problem in it."""
        limits, tree = load_section(path, Policy, _broken_rules)
        return cls(limits, {key: origin.where for key, origin in tree.origins.items()}, min_batch)

    def check_run(self, settings: RunSettings, task: str) -> None:
        """Raise PolicyError if a run of these settings, and of this task, is not allowed.

        The size of minibatches is left to :meth:`check_batch`, which knows how many examples there are.
        """
        self._require([each for each in self.demands(settings, task) if each.key != ("min_batch",)])

    def check_batch(self, size: int, examples: Mapping[int, int]) -> None:
        """Raise PolicyError if minibatches are too small for one of the workers' numbers of examples."""
        fewest = self.limits.min_batch or self.min_batch
        for worker, count in examples.items():
            if size < min(fewest, count):
                self._require([self._of_batch(size, f"worker {worker} has {count} examples")])

    def check_epsilon(self, planned: float, worker: int) -> None:
        """Raise PolicyError if a run's rounds would cost each of a worker's records more than is allowed."""
        largest = self.limits.epsilon
        if largest is not None and planned > largest:
            found = f"the run's rounds cost worker {worker} {planned:.4g}"
            self._require([self._of("epsilon", f"at most {largest:g}", found)])

    def check_server(self, address: Address, authorities: bytes | None) -> None:
        """Raise PolicyError unless this server may be connected to, with these authorities (PEM)."""
        demands = []
        if self.limits.servers is not None:
            allowed = _one_of(map(str, self.limits.servers))
            demands.append(self._of("servers", allowed, str(address), address in self.limits.servers))
        if self.limits.authorities is not None:
            found = [hashlib.sha256(der).hexdigest() for der in pem_certificates(authorities or b"")]
            others = [print_ for print_ in found if print_ not in self.limits.authorities]
            what = f"--ca with {', '.join(others)}" if others else "no --ca, which is plaintext"
            allowed = f"certificates in --ca with the fingerprints {', '.join(self.limits.authorities)} only"
            demands.append(self._of("authorities", allowed, what, bool(found) and not others))
        self._require(demands)

    def check_rounds(self, rounds: int, local_steps: int, worker: int) -> None:
        """Raise PolicyError if a worker would answer more synchronization rounds than the policy allows."""
        most = self.most_answers(local_steps)
        if most is not None and rounds > most:
            found = f"worker {worker} is asked for its answer no. {rounds} of {local_steps} local steps"
            allowed = f"at most {self.limits.max_rounds} rounds, restarts counted"
            self._require([self._of("max_rounds", allowed, found)])

    def most_answers(self, local_steps: int) -> int | None:
        """The synchronization rounds that one worker may answer in a run; ``None`` for any number."""
        most = self.limits.max_rounds
        return None if most is None else -(-most // local_steps)

    def demands(self, settings: RunSettings, task: str) -> list[Demand]:
        """All that the policy says of a run with these settings and this task; met or not."""
        limits, run, stated = self.limits, settings.parameters, disclosed(settings)
        demands = list(self._of_task(task, settings.task_options))
        if limits.algorithms is not None:
            allowed = _one_of(limits.algorithms)
            demands.append(self._of("algorithms", allowed, run.name, run.name in limits.algorithms))
        if (least := limits.min_workers) is not None:
            workers = f"{run.workers} workers"
            demands.append(self._of("min_workers", f"at least {least}", workers, run.workers >= least))
        if (most := limits.max_rounds) is not None:
            rounds = f"{run.rounds} rounds"
            demands.append(self._of("max_rounds", f"at most {most}", rounds, run.rounds <= most))
        demands.append(self._of_batch(settings.batch_size))
        if limits.secure_aggregation == "required":
            is_met, right = stated.privacy.secure_aggregation, "privacy.secure_aggregation: true"
            demands.append(self._of("secure_aggregation", right, shown(is_met), is_met))
        for key, found in (("losses", stated.privacy.losses), ("metrics", stated.metrics)):
            if getattr(limits, key) == "hidden":
                right = "privacy.losses: hidden"
                demands.append(self._of(key, right, f"{key} are {found}", found == "hidden"))
        records = stated.records
        for key in ("epsilon", "delta"):
            if (largest := getattr(limits, key)) is None:
                continue
            value = None if records is None else getattr(records, key)
            is_met, found = value is not None and value <= largest, "none is stated"
            if value is not None:
                found = f"{value:g}"
            elif records is not None:
                # How much noise is worth depends on how many records there are.
                is_met, found = True, f"noise {records.noise:g}; the worker computes its epsilon"
            demands.append(self._of(key, f"privacy.records with {key} at most {largest:g}", found, is_met))
        return demands

    def _of(self, key: str | KeyPath, allowed: str, found: str, is_met: bool = False) -> Demand:
        path: KeyPath = (key,) if isinstance(key, str) else key
        place = path
        while place and place not in self.places:
            place = place[:-1]
        return Demand(path, allowed, found, is_met, self.places.get(place, ""))

    def _of_task(self, task: str, options: Mapping[str, Any]) -> Iterator[Demand]:
        if self.limits.tasks is None:
            return
        known = {_identity(name): name for name in self.limits.tasks}
        name = known.get(_identity(task))
        yield self._of("tasks", _one_of(known.values()), task, name is not None)
        allowed = self.limits.tasks[name] if name is not None else ANY
        if allowed == ANY:
            return
        assert name is not None
        values = allowed if isinstance(allowed, dict) else {}
        for key, value in options.items():
            ours = values.get(key, [])
            right = "any value" if ours == ANY else _one_of(map(shown, ours))
            if key not in values:
                right = f"its default; the options that may be set are {', '.join(values) or 'none'}"
            # As JSON, in which true is not 1.
            is_met = ours == ANY or json.dumps(value) in map(json.dumps, ours)
            yield self._of(("tasks", name, key), right, f"{key}: {shown(value)}", is_met)

    def _of_batch(self, size: int, examples: str = "") -> Demand:
        fewest = self.limits.min_batch or self.min_batch
        allowed = f"task.batch_size at least {fewest}, or all examples of a worker that has fewer"
        found = "; ".join(filter(None, (f"minibatches of {size}", examples)))
        demand = self._of("min_batch", allowed, found, size >= fewest)
        if self.limits.min_batch is not None:
            return demand
        # From the gradient of so few the examples themselves can be computed.
        return replace(demand, where=f"--min-batch {fewest}")

    def _require(self, demands: Sequence[Demand]) -> None:
        broken = [demand for demand in demands if not demand.is_met]
        if broken:
            keys = [str(demand.key[0]) for demand in broken]
            what = "this site's policy forbids what the server asks for, and nothing of it was sent:"
            problems = [Problem(each.key, each.found, each.allowed, where=each.where) for each in broken]
            raise PolicyError("\n\n".join([f"{what} {', '.join(keys)}", *map(str, problems)]), keys)


def _one_of(allowed: Iterable[str]) -> str:
    names = ", ".join(allowed)
    return f"one of {names}" if names else "none: the list is empty"


def _identity(task: str) -> str:
    """What a task's name and its path have in common."""
    from afl.tasks.registry import known_tasks  # noqa: PLC0415  # with PyTorch

    return known_tasks().get(task) or (as_module_path(task) if ":" in task else task)
