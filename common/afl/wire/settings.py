"""What a worker must know of the run: sent in the Welcome, the same for all."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

from afl.config import Config
from afl.config.compare import flat, unlike
from afl.config.compressors import IDENTITY, resolved_options
from afl.config.schema import Durability
from afl.core.algorithms.registry import algorithm_named, is_installed
from afl.core.algorithms.schedule import LEAST_FACTOR, MOST_STEPS, SHAPES, Schedule
from afl.core.algorithms.settings import (
    OPTIMIZERS,
    AlgorithmSettings,
    CompressorChoice,
    DualChoice,
    OptimizerChoice,
)
from afl.core.codecs.plain import VALUE_BYTES
from afl.core.dual import is_rule, rule_named
from afl.core.record_privacy import LEAST, MOST_NOISE, RecordPrivacy
from afl.errors import PeerError, ProtocolError, VersionError
from afl.outside import words
from afl.security.identity import LARGEST_WORKER_ID
from afl.v1 import federation_pb2 as pb

MOST_THREADS = 1024
"""As ``worker.threads`` takes."""

LEAST_SECONDS, MOST_SECONDS = 0.01, 86400.0
"""As ``server.heartbeat`` and ``server.peer_timeout`` take."""

LARGEST_CHUNK_BYTES = 16 * 1024 * 1024
"""As ``server.chunk_bytes`` takes."""

MOST_LOCAL_STEPS = 10**6
"""As ``algorithm.local_steps`` takes: between two synchronizations a worker is bound to them."""

LARGEST_COUNT = 2**53
"""What a float64 holds exactly, too."""


@dataclass(frozen=True)
class RunSettings:
    """The run as workers see it; durations in seconds."""

    task: str
    task_options: Mapping[str, Any]
    batch_size: int
    evaluation_batch_size: int
    threads: int
    batch_oracles: bool
    parameters: AlgorithmSettings
    chunk_bytes: int
    heartbeat: float
    peer_timeout: float
    journal: str = "off"
    """What a worker's journal survives: ``process``, ``machine``, or ``off``."""
    skips_non_finite: bool = False
    single_reports: bool = False

    @classmethod
    def of_config(cls, config: Config, local_options: frozenset[str] = frozenset()) -> RunSettings:
        """The settings that a configuration gives, without the task's options that are this machine's own."""
        algorithm = config.algorithm
        up, down = algorithm.uplink_compressor, algorithm.downlink_compressor
        is_exact_down = down == up or down.name == IDENTITY
        uplink, downlink = (
            CompressorChoice(
                way.name,
                resolved_options(way.name, way.options, workers=config.workers, is_exact_down=is_exact_down),
            )
            for way in (up, down)
        )
        return cls(
            task=config.task.name,
            task_options={
                name: value for name, value in config.task.options.items() if name not in local_options
            },
            batch_size=config.task.batch_size,
            evaluation_batch_size=config.task.evaluation_batch_size,
            threads=config.worker.threads,
            batch_oracles=config.worker.batch_oracles,
            parameters=AlgorithmSettings(
                name=algorithm.name,
                workers=config.workers,
                rounds=algorithm.rounds,
                block=algorithm.block_length,
                eta_w=algorithm.eta_w_value,
                eta_q=config.eta_q_value,
                local_steps=algorithm.local_steps or 1,
                sampled=algorithm.sampled,
                largest_weight=algorithm.largest_weight,
                dual=algorithm.dual_choice,
                weigh_by_samples=algorithm.weighting == "samples",
                schedule=algorithm.step_schedule,
                optimizer=algorithm.optimizer_choice,
                server_eta=algorithm.server_eta or 1.0,
                mean_of_last=algorithm.block_length if algorithm.final_model == "block-mean" else 0,
                weight_decay=algorithm.weight_decay or 0.0,
                clip_norm=algorithm.clip_norm,
                uplink=uplink,
                downlink=downlink,
                secure_aggregation=config.privacy.secure_aggregation,
                hides_losses=config.privacy.losses == "hidden",
                held_out=config.task.held_out,
                dual_loss_held_out=algorithm.dual_loss == "held-out",
                records=config.privacy.record_privacy,
                own=algorithm.own,
            ),
            # Whole values: the server sums a chunk's values as they come.
            chunk_bytes=config.server.chunk_bytes // VALUE_BYTES * VALUE_BYTES,
            heartbeat=config.server.heartbeat,
            peer_timeout=config.server.peer_timeout,
            journal=config.worker.journal,
            skips_non_finite=config.faults.non_finite == "skip",
            single_reports=config.faults.update_norm is not None,
        )

    def check(self) -> None:
        """Raise PeerError for what no configuration can be behind: it would take this machine's memory or
        threads, or overflow a clock."""
        parameters = self.parameters
        names = (self.task, parameters.name, parameters.uplink.name, parameters.downlink.name)
        for name in names:
            if words(name) != name:
                raise PeerError(
                    f"the server names a task or an algorithm {words(name)}: too long, or not printable"
                )
        for what, value, least, most in (
            ("threads", self.threads, 1, MOST_THREADS),
            ("heartbeat_seconds", self.heartbeat, LEAST_SECONDS, MOST_SECONDS),
            ("peer_timeout_seconds", self.peer_timeout, LEAST_SECONDS, MOST_SECONDS),
            ("chunk_bytes", self.chunk_bytes, VALUE_BYTES, LARGEST_CHUNK_BYTES),
            ("workers", parameters.workers, 1, LARGEST_WORKER_ID + 1),
            ("rounds", parameters.rounds, 1, LARGEST_COUNT),
            ("batch_size", self.batch_size, 1, LARGEST_COUNT),
            ("evaluation_batch_size", self.evaluation_batch_size, 1, LARGEST_COUNT),
            ("block", parameters.block, 1, LARGEST_COUNT),
            ("local_steps", parameters.local_steps, 1, MOST_LOCAL_STEPS),
            ("sampled", parameters.sampled or 1, 1, LARGEST_COUNT),
        ):
            if not least <= value <= most:
                found = words(str(value), 40)
                raise PeerError(
                    f"the server's settings: {what} is {found}; it must be from {least} to {most}"
                )
        records = parameters.records
        if records is None:
            return
        if (records.noise is None) is (records.epsilon is None):
            raise PeerError("the server's settings: privacy.records has either noise or epsilon")
        if max(records.noise or 0.0, records.loss_noise or 0.0, records.metric_noise or 0.0) > MOST_NOISE:
            raise PeerError(f"the server's settings: noise above {MOST_NOISE:g} in privacy.records")
        if records.too_small:
            raise PeerError(f"the server's settings: {records.too_small} in privacy.records, below {LEAST:g}")
        if self.journal != "machine" or parameters.held_out:
            raise PeerError(
                "the server's settings: with privacy.records, worker.journal is machine, and task.held_out 0"
            )

    def differences(self, other: RunSettings) -> list[str]:
        """What of the run is not the same in ``other``, a line each: name, this value and the other. Chunks,
        heartbeats, their limit and whether reports are joined may change with each start of the server."""
        return [
            f"{name} is {mine} here and {its} at the server"
            for name, mine, its in unlike(_flat(self), _flat(other))
            if name not in _OF_A_START
        ]

    def digest(self) -> bytes:
        """32 bytes (SHA-256) that two settings share exactly if there are no :meth:`differences`."""
        of_the_run = replace(self, **_OF_A_START).to_message()
        return hashlib.sha256(of_the_run.SerializeToString(deterministic=True)).digest()

    def to_message(self) -> pb.RunSettings:
        """The message of a Welcome that carries the settings."""
        parameters = self.parameters
        shared = {name: getattr(parameters, name) for name in _CHECKS}
        for name in _WHERE_SET:
            # The dual rule is the server's own business where it alone knows the weights.
            if shared[name] == getattr(_DEFAULTS, name) or (name == "dual" and not parameters.hides_losses):
                # A worker of a version that does not know it need not.
                del shared[name]
        return pb.RunSettings(
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            task_options=json.dumps(self.task_options, sort_keys=True),
            heartbeat_seconds=self.heartbeat,
            peer_timeout_seconds=self.peer_timeout,
            algorithm=parameters.name,
            workers=parameters.workers,
            rounds=parameters.rounds,
            eta_w=parameters.eta_w,
            secure_aggregation=parameters.secure_aggregation,
            hides_losses=parameters.hides_losses,
            uplink=_choice_message(parameters.uplink),
            downlink=_choice_message(parameters.downlink),
            algorithm_options=json.dumps({**shared, **parameters.own}, default=_told_parts, sort_keys=True),
        )

    @classmethod
    def of_message(cls, message: pb.RunSettings) -> RunSettings:
        """From the wire. Raises ProtocolError if a part is missing or malformed."""
        counts = (message.workers, message.rounds, message.batch_size, message.evaluation_batch_size)
        durations = (message.heartbeat_seconds, message.peer_timeout_seconds)
        if not all(counts) or not message.chunk_bytes or not all(0 < value < math.inf for value in durations):
            raise ProtocolError("the server's settings lack a count, a size or a duration")
        if message.chunk_bytes % VALUE_BYTES:
            raise ProtocolError(f"chunks of {message.chunk_bytes} bytes would cut a value in two")
        if not math.isfinite(message.eta_w):
            raise ProtocolError(f"the server's eta_w is {message.eta_w}")
        if message.journal not in get_args(Durability):
            known = ", ".join(get_args(Durability))
            raise ProtocolError(f"the server's journal is {message.journal!r}, none of {known}")
        settings: dict[str, Any] = {name: getattr(message, name) for name in _AS_THEY_ARE}
        return cls(
            **settings | {"threads": max(1, message.threads)},
            task_options=_json_object(message.task_options, "task_options"),
            heartbeat=message.heartbeat_seconds,
            peer_timeout=message.peer_timeout_seconds,
            parameters=AlgorithmSettings(
                name=message.algorithm,
                workers=message.workers,
                rounds=message.rounds,
                eta_w=message.eta_w,
                secure_aggregation=message.secure_aggregation,
                hides_losses=message.hides_losses,
                **_algorithm_options(message.algorithm, message.algorithm_options),
                uplink=_choice_of(message.uplink),
                downlink=_choice_of(message.downlink),
            ),
        )


def _flat(settings: RunSettings) -> dict[str, Any]:
    values = asdict(settings)
    parameters = values.pop("parameters")
    return dict(flat({**parameters.pop("own"), **parameters, **values}))


_AS_THEY_ARE = frozenset(pb.RunSettings.DESCRIPTOR.fields_by_name).intersection(
    field.name for field in fields(RunSettings) if field.name != "task_options"
)
"""What the message has by the same name."""

_OF_A_START: dict[str, Any] = {
    "chunk_bytes": 0,
    "heartbeat": 0.0,
    "peer_timeout": 0.0,
    "single_reports": False,
}
"""What may change with each start of the server, as it is where nothing of it is told."""


def _algorithm_options(algorithm: str, text: str) -> dict[str, Any]:
    """The shared options, and what is the algorithm's own; of one that is not installed here, all of it."""
    given = {"block": 1, "eta_q": 0.0, **_json_object(text, "algorithm_options")}
    checks = dict(_CHECKS)
    if is_installed(algorithm):
        own = {option.name: (option.takes, option.accepted) for option in algorithm_named(algorithm).options}
        checks |= own
        for name in sorted(given.keys() - checks.keys()):
            raise VersionError(f"the server's algorithm_options: this version does not know {name!r}")
        for name in sorted(own.keys() - given.keys()):
            raise ProtocolError(f"the server's algorithm_options lack {name!r}, which {algorithm} has here")
    for name, (is_right, what) in checks.items():
        if name in given and not is_right(given[name]):
            raise ProtocolError(f"the server's algorithm_options: {name} is {given[name]!r}, not {what}")
    shared: dict[str, Any] = {name: given.pop(name) for name in _CHECKS if name in given}
    for name, (kind, _) in _PARTS.items():
        if name in shared:
            values = {key: tuple(v) if isinstance(v, list) else v for key, v in shared[name].items()}
            shared[name] = kind(**values)
    if "dual" in shared:
        shared["dual"] = DualChoice(**shared["dual"])
    return {**shared, "eta_q": float(shared["eta_q"]), "own": given}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_step_size(value: Any) -> bool:
    return type(value) in {int, float} and 0 <= value <= sys.float_info.max


def _is_positive(value: Any) -> bool:
    return _is_step_size(value) and value > 0


def _is_share(value: Any) -> bool:
    return _is_step_size(value) and value <= 1


def _is_dual(value: Any) -> bool:
    """Whether it is a rule by which a worker can follow its own weight, with that rule's options."""
    if not (isinstance(value, dict) and value.keys() == {"name", "options"}):
        return False
    name, given = value["name"], value["options"]
    if not (isinstance(name, str) and is_rule(name) and isinstance(given, dict)):
        return False
    options = rule_named(name).options
    is_complete = given.keys() == {option.name for option in options}
    return is_complete and all(option.takes(given[option.name]) for option in options)


_PARTS: Mapping[str, tuple[Callable[..., Any], Mapping[str, Callable[[Any], bool]]]] = {
    "schedule": (
        Schedule,
        {
            "warm_up": lambda value: type(value) is int and 0 <= value <= LARGEST_COUNT,
            "then": lambda value: value in SHAPES,
            "final": _is_share,
            "at": lambda value: (
                isinstance(value, list) and len(value) <= MOST_STEPS and all(map(_is_count, value))
            ),
            "factor": lambda value: _is_share(value) and value >= LEAST_FACTOR,
            "eta_q": lambda value: type(value) is bool,
        },
    ),
    "optimizer": (
        OptimizerChoice,
        {
            "name": lambda value: value in OPTIMIZERS,
            "beta_1": lambda value: _is_share(value) and value < 1,
            "beta_2": lambda value: _is_share(value) and value < 1,
            "epsilon": _is_positive,
        },
    ),
    "records": (
        RecordPrivacy,
        {
            **dict.fromkeys(("clip", "loss_clip"), _is_positive),
            "delta": lambda value: _is_share(value) and 0 < value < 1,
            **dict.fromkeys(
                ("noise", "loss_noise", "epsilon", "metric_noise"),
                lambda value: value is None or _is_positive(value),
            ),
        },
    ),
}
"""What is told in several values, and what each must be."""


_NEWER = {"metric_noise"}
"""Those that are told only where they are not at their defaults: a worker that does not know one need not."""


def _told_parts(parts: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(parts).items() if name not in _NEWER or value is not None}


def _has_parts(name: str) -> Callable[[Any], bool]:
    checks = _PARTS[name][1]
    return lambda given: (
        isinstance(given, dict)
        and checks.keys() - _NEWER <= given.keys() <= checks.keys()
        and all(is_right(given.get(key)) for key, is_right in checks.items())
    )


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "block": (_is_count, "a count of rounds"),
    "eta_q": (_is_step_size, "a step size"),
    "local_steps": (_is_count, "a count of steps"),
    "sampled": (lambda value: value is None or _is_count(value), "a count of workers, or null"),
    "weigh_by_samples": (lambda value: type(value) is bool, "true or false"),
    "largest_weight": (lambda value: _is_share(value) and value > 0, "a share above 0"),
    "dual": (_is_dual, "a dual rule with its options"),
    "held_out": (lambda value: _is_share(value) and value < 1, "a share below 1"),
    "dual_loss_held_out": (lambda value: type(value) is bool, "true or false"),
    "schedule": (_has_parts("schedule"), "a schedule of step sizes"),
    "optimizer": (_has_parts("optimizer"), "an optimizer and its constants"),
    "mean_of_last": (_is_count, "a count of rounds"),
    "weight_decay": (_is_step_size, "a number from 0"),
    "clip_norm": (_is_positive, "a norm above 0"),
    "records": (_has_parts("records"), "clips, noise or epsilon, and delta"),
}
"""What a Welcome has of an algorithm's options, used or not, in this order; its own come behind."""

_WHERE_SET = (
    *("largest_weight", "dual", "held_out", "dual_loss_held_out"),
    *("schedule", "optimizer", "mean_of_last", "weight_decay", "clip_norm", "records"),
)
"""Those that it has only where they are not at their defaults."""

_DEFAULTS = AlgorithmSettings(workers=1, rounds=1, block=1, eta_w=0.0, eta_q=0.0)


def _choice_message(choice: CompressorChoice) -> pb.CompressorSettings:
    return pb.CompressorSettings(name=choice.name, options=json.dumps(choice.options, sort_keys=True))


def _choice_of(message: pb.CompressorSettings) -> CompressorChoice:
    return CompressorChoice(message.name, _json_object(message.options, "options of a compressor"))


def _json_object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server's {what} are not JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"the server's {what} are not a JSON object")
    return value
