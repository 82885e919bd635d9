"""What a worker must know of the run: sent in the Welcome, the same for all."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afl.algorithms.afl_com import AflComSettings, CompressorChoice
from afl.codecs.payload import VALUE_BYTES
from afl.config import Config
from afl.errors import ProtocolError
from afl.v1 import federation_pb2 as pb


@dataclass(frozen=True)
class RunSettings:
    """The run as workers see it; durations in seconds."""

    task: str
    task_options: Mapping[str, Any]
    batch_size: int
    evaluation_batch_size: int
    threads: int
    algorithm: str
    parameters: AflComSettings
    chunk_bytes: int
    heartbeat: float
    peer_timeout: float

    @property
    def workers(self) -> int:
        """m."""
        return self.parameters.workers

    @property
    def rounds(self) -> int:
        """T."""
        return self.parameters.rounds

    @classmethod
    def of_config(cls, config: Config, local_options: frozenset[str] = frozenset()) -> RunSettings:
        """The settings that a configuration gives.

        Args:
            local_options: options of the task that are this machine's own and stay here.
        """
        algorithm = config.algorithm
        uplink = _choice(algorithm.uplink)
        return cls(
            task=config.task.name,
            task_options={
                key: value for key, value in config.task.options.items() if key not in local_options
            },
            batch_size=config.task.batch_size,
            evaluation_batch_size=config.task.evaluation_batch_size,
            threads=config.worker.threads,
            algorithm=algorithm.name,
            parameters=AflComSettings(
                workers=config.workers,
                rounds=algorithm.rounds,
                block=algorithm.block_length,
                eta_w=algorithm.eta_w_value,
                eta_q=config.eta_q_value,
                uplink=uplink,
                downlink=uplink if algorithm.downlink is None else _choice(algorithm.downlink),
            ),
            # Whole values: the server sums a chunk's values as they come.
            chunk_bytes=config.server.chunk_bytes // VALUE_BYTES * VALUE_BYTES,
            heartbeat=config.server.heartbeat,
            peer_timeout=config.server.peer_timeout,
        )

    def to_message(self) -> pb.RunSettings:
        """For the wire."""
        parameters = self.parameters
        return pb.RunSettings(
            workers=parameters.workers,
            task=self.task,
            task_options=json.dumps(dict(self.task_options), sort_keys=True),
            batch_size=self.batch_size,
            evaluation_batch_size=self.evaluation_batch_size,
            threads=self.threads,
            algorithm=self.algorithm,
            rounds=parameters.rounds,
            eta_w=parameters.eta_w,
            uplink=_choice_message(parameters.uplink),
            downlink=_choice_message(parameters.downlink),
            algorithm_options=json.dumps({"block": parameters.block, "eta_q": parameters.eta_q}),
            chunk_bytes=self.chunk_bytes,
            heartbeat_seconds=self.heartbeat,
            peer_timeout_seconds=self.peer_timeout,
        )

    @classmethod
    def of_message(cls, message: pb.RunSettings) -> RunSettings:
        """From the wire.

        Raises:
            ProtocolError: if a part is missing or malformed.
        """
        options = _json_object(message.algorithm_options, "algorithm_options")
        block, eta_q = options.get("block", 1), options.get("eta_q", 0.0)
        counts = (message.workers, message.rounds, message.batch_size, message.evaluation_batch_size)
        durations = (message.heartbeat_seconds, message.peer_timeout_seconds)
        if not all(counts) or not message.chunk_bytes or not all(0 < value < math.inf for value in durations):
            raise ProtocolError("the server's settings lack a count, a size or a duration")
        if message.chunk_bytes % VALUE_BYTES:
            raise ProtocolError(f"chunks of {message.chunk_bytes} bytes would cut a value in two")
        if type(block) is not int or block < 1:
            raise ProtocolError(f"the server's algorithm_options: block is {block!r}, not a count of rounds")
        if type(eta_q) not in {int, float} or not 0 <= eta_q <= sys.float_info.max:
            raise ProtocolError(f"the server's algorithm_options: eta_q is {eta_q!r}, not a step size")
        if not math.isfinite(message.eta_w):
            raise ProtocolError(f"the server's eta_w is {message.eta_w}")
        return cls(
            task=message.task,
            task_options=_json_object(message.task_options, "task_options"),
            batch_size=message.batch_size,
            evaluation_batch_size=message.evaluation_batch_size,
            threads=max(1, message.threads),
            algorithm=message.algorithm,
            parameters=AflComSettings(
                workers=message.workers,
                rounds=message.rounds,
                block=int(block),
                eta_w=message.eta_w,
                eta_q=float(eta_q),
                uplink=_choice_of(message.uplink),
                downlink=_choice_of(message.downlink),
            ),
            chunk_bytes=message.chunk_bytes,
            heartbeat=message.heartbeat_seconds,
            peer_timeout=message.peer_timeout_seconds,
        )


def _choice(section: Any) -> CompressorChoice:
    return CompressorChoice() if section is None else CompressorChoice(section.name, section.options)


def _choice_message(choice: CompressorChoice) -> pb.CompressorSettings:
    return pb.CompressorSettings(name=choice.name, options=json.dumps(dict(choice.options), sort_keys=True))


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
