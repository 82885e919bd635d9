"""The configuration of a run: every key, its type, default, unit, bounds and meaning.

The models are frozen, take no unknown key, and convert nothing silently (``"3"`` is not 3). What several
keys demand of each other is in :mod:`afl.config.rules`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from afl import theory
from afl.config import rules
from afl.config.address import Address, parse_listen
from afl.config.compressors import IDENTITY
from afl.config.describe import Accepts, Null, OneOf, Unit
from afl.config.quantities import Duration, Size
from afl.core.algorithms.registry import algorithm_named, algorithm_names, is_installed, users_of
from afl.core.policy import DEFAULT_QUORUM, AbsencePolicy, DivergenceWatch
from afl.errors import AddressError

INT32_MAX: Final = 2**31 - 1

SEED_BITS: Final = 128


def _seed(value: object) -> int:
    if isinstance(value, str):
        if not re.fullmatch(r"0x[0-9a-f]{1,32}", value, re.IGNORECASE | re.ASCII):
            raise ValueError("as text, a seed is 0x and 1 to 32 hexadecimal digits")
        return int(value, 16)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << SEED_BITS:
        raise ValueError("a seed is a whole number from 0 to 2^128 - 1")
    return value


def _listen_address(value: object) -> Address:
    if isinstance(value, Address):
        return value
    if not isinstance(value, str):
        raise ValueError("not text")  # noqa: TRY004  # a TypeError would escape the validation
    try:
        return parse_listen(value)
    except AddressError as error:
        raise ValueError(str(error)) from error


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value and "\0" not in value else value


def _finite(value: JsonValue) -> JsonValue:
    """Only what JSON has: a digest of the configuration and equality of a reloaded one depend on it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("neither infinite nor NaN")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(inner)
    return value


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("a name appears twice")
    return names


def _installed_algorithm(name: str) -> str:
    if not is_installed(name):
        raise PydanticCustomError("not_installed", "not installed")
    return name


def _hexadecimal(seed: int) -> str:
    return f"0x{seed:032x}"


Count: TypeAlias = Annotated[int, Field(ge=1, le=INT32_MAX)]

Option: TypeAlias = Annotated[JsonValue, AfterValidator(_finite)]

PathName: TypeAlias = Annotated[Path, BeforeValidator(_path)]

Name: TypeAlias = Annotated[str, Field(min_length=1), Accepts("a name")]

Seed: TypeAlias = Annotated[
    int,
    PlainValidator(_seed),
    PlainSerializer(_hexadecimal, return_type=str),
    Accepts("a whole number from 0 to 2^128 - 1, or 0x and 1 to 32 hexadecimal digits"),
]

ListenAddress: TypeAlias = Annotated[
    Address,
    PlainValidator(_listen_address),
    PlainSerializer(str, return_type=str),
    Accepts(
        "host:port: 127.0.0.1:50051, '[::1]:50051' in quotes, :50051 (all addresses); port 0 is any free one"
    ),
]

Constant: TypeAlias = Annotated[float, Field(ge=1e-12, le=1e12, allow_inf_nan=False)]


Durability: TypeAlias = Literal["process", "machine", "off"]
"""What a thing that is written down survives: the process's end, a loss of power too, or nothing."""


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Compressor(Section):
    """A compressor and its options."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Option]

    name: Annotated[
        Name,
        Field(
            description="the compressor: identity, top-k, rand-k, scaled-sign, projection, dct-projection,"
            " or an installed one"
        ),
    ] = IDENTITY

    @property
    def options(self) -> dict[str, JsonValue]:
        """What the compressor is made with."""
        return dict(self.model_extra or {})


class Task(Section):
    """What is learned."""

    name: Annotated[Name, Field(description="the task, as installed or as given with --task")]
    options: Annotated[dict[str, Option], Field(description="keyword arguments of the task")] = Field(
        default_factory=dict
    )
    batch_size: Annotated[
        Count, Unit("examples"), Field(description="minibatch of one worker in one round")
    ] = 32
    evaluation_batch_size: Annotated[
        Count, Unit("examples"), Field(description="batch in evaluations; bounds their memory")
    ] = 1024


def _only(option: str) -> str:
    return f"{' and '.join(users_of(option))} only"


class Algorithm(Section):
    """How it is learned: what several algorithms take, and what is the own of the one that is named."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Option]

    name: Annotated[
        str,
        OneOf(algorithm_names),
        AfterValidator(_installed_algorithm),
        Field(
            description="afl-br sends whole vectors; afl-com compresses both ways;"
            " sgda, drfa and fedavg are for comparison; or an installed one of your own"
        ),
    ]
    rounds: Annotated[Count, Unit("rounds"), Field(description="T, the number of update rounds")]
    block: Annotated[
        Count | Literal["auto"] | None,
        Unit("rounds"),
        Null("auto"),
        Field(
            description="B, rounds between two restarts of the dual weights; auto is ceil(sqrt T); "
            + _only("block")
        ),
    ] = None
    eta_w: Annotated[
        Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | Literal["theory"],
        Field(description="step size on the parameters; theory is 1 / (8 L T^(3/4)) and needs smoothness"),
    ]
    eta_q: Annotated[
        Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | Literal["theory"] | None,
        Unit("1/loss"),
        Null("not given"),
        Field(
            description="step size on the dual weights, required except for fedavg; theory is"
            " 2 sqrt(ln m) / (sigma_q T^(1/4)) and needs sigma_q"
        ),
    ] = None
    local_steps: Annotated[
        Count | None,
        Unit("steps"),
        Null("1"),
        Field(description=f"tau, a worker's steps between two synchronizations; {_only('local_steps')}"),
    ] = None
    sampled: Annotated[
        Count | None,
        Unit("workers"),
        Null("all workers"),
        Field(description=f"b, how many workers a synchronization draws; {_only('sampled')}"),
    ] = None
    weighting: Annotated[
        Literal["uniform", "samples"] | None,
        Null("uniform"),
        Field(
            description="how much a worker's model counts: all equally, or by training examples; "
            + _only("weighting")
        ),
    ] = None
    smoothness: Annotated[
        Constant | None,
        Null("not given"),
        Field(description="L, the smoothness constant of the losses; with eta_w: theory, and only then"),
    ] = None
    sigma_q: Annotated[
        Constant | None,
        Unit("loss"),
        Null("not given"),
        Field(description="sub-Gaussian parameter of the minibatch loss; with eta_q: theory, and only then"),
    ] = None
    uplink: Annotated[
        Annotated[Compressor, Accepts("a section with name and the compressor's options")] | None,
        Null("identity"),
        Field(description=f"compressor from the workers to the server; {_only('uplink')}"),
    ] = None
    downlink: Annotated[
        Annotated[Compressor, Accepts("a section with name and the compressor's options")] | None,
        Null("the same as uplink"),
        Field(description=f"compressor from the server to the workers; {_only('downlink')}"),
    ] = None

    def takes(self, option: str) -> bool:
        """Whether the algorithm uses an option that several have."""
        return option in algorithm_named(self.name).takes

    @property
    def own(self) -> dict[str, Any]:
        """The values of the options that are the algorithm's own, by name, with their defaults."""
        given = self.model_extra or {}
        return {
            option.name: given.get(option.name, option.default)
            for option in algorithm_named(self.name).options
        }

    @property
    def block_length(self) -> int:
        """B, the number of rounds between two restarts of the dual weights."""
        return theory.block_length(self.rounds) if self.block in {None, "auto"} else int(self.block)

    @property
    def restart_length(self) -> int:
        """B where the algorithm restarts its dual weights, else 0."""
        return self.block_length if self.takes("block") else 0

    @property
    def eta_w_value(self) -> float:
        """The step size on the parameters."""
        if self.eta_w != "theory":
            return self.eta_w
        assert self.smoothness is not None
        return theory.primal_step(self.rounds, self.smoothness)

    def eta_q_value(self, workers: int) -> float:
        """The step size on the dual weights of ``workers`` workers, in 1/loss."""
        if self.eta_q != "theory":
            return self.eta_q or 0.0
        assert self.sigma_q is not None
        return theory.dual_step(self.rounds, workers, self.sigma_q)

    @property
    def uplink_compressor(self) -> Compressor:
        """The compressor from the workers to the server."""
        return self.uplink or Compressor()

    @property
    def downlink_compressor(self) -> Compressor:
        """The compressor from the server to the workers."""
        return self.downlink or self.uplink_compressor

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        rules.require(rules.algorithm(self.model_dump()))
        return self


class Evaluation(Section):
    """When the model is evaluated at every worker."""

    every: Annotated[
        Count,
        Unit("rounds"),
        Field(description="rounds between evaluations; the last round is always evaluated"),
    ] = 50


class Run(Section):
    """One execution."""

    directory: Annotated[
        PathName | None,
        Null("runs/ and the run id"),
        Field(description="where checkpoints and results go; final, random and best models are always saved"),
    ] = None
    seed: Annotated[
        Seed | None,
        Null("a fresh one"),
        Field(description="every random choice of the run is made from it"),
    ] = None
    description: Annotated[
        str | None,
        Null("none"),
        Field(description="what the data is, in your own words, for the card of an exported model"),
    ] = None
    trackers: Annotated[
        list[Name],
        Accepts("a list of names, each once"),
        AfterValidator(_each_once),
        Field(
            description="where metrics also go: tensorboard, mlflow, wandb, or an installed one;"
            " metrics.jsonl is always written"
        ),
    ] = []


class Tls(Section):
    """How the server proves who it is, and whether workers must."""

    certificate: Annotated[
        PathName,
        Field(
            description="the server's certificate and those between it and its authority (PEM); read again"
            " when it changes"
        ),
    ]
    key: Annotated[PathName, Field(description="the certificate's private key (PEM, not encrypted)")]
    client_ca: Annotated[
        PathName | None,
        Null("none is asked for"),
        Field(
            description="authorities of the workers' certificates (PEM), which are then required; a"
            " certificate speaks for the ids that it names, as in afl:worker:0-9"
        ),
    ] = None


class Server(Section):
    """The server process."""

    listen: Annotated[ListenAddress, Field(description="where workers connect (gRPC)")] = Address(
        "127.0.0.1", 50051
    )
    http: Annotated[
        ListenAddress | None,
        Null("off"),
        Field(description="where the status page, /status, /metrics, /healthz and /readyz are served"),
    ] = Address("127.0.0.1", 9090)
    tls: Annotated[
        Annotated[Tls, Accepts("a section with certificate, key and client_ca")] | None,
        Null("plaintext"),
        Field(description="encrypt, and let workers know the server by its certificate"),
    ] = None
    tokens: Annotated[
        PathName | None,
        Null("none is asked for"),
        Field(
            description="a file of lines IDS sha256:HASH: a worker must have a token of such a hash, and"
            " speaks for those ids; read again when it changes"
        ),
    ] = None
    insecure: Annotated[
        bool, Field(description="allow plaintext on addresses that other machines can reach")
    ] = False
    heartbeat: Annotated[
        Duration,
        Field(ge=Duration("10ms"), le=Duration("1h"), description="time between heartbeats, both ways"),
    ] = Duration("10s")
    peer_timeout: Annotated[
        Duration,
        Field(
            ge=Duration("20ms"),
            le=Duration("24h"),
            description="silence that ends a session, at least two heartbeats; a long step is not silence",
        ),
    ] = Duration("60s")
    handshake_timeout: Annotated[
        Duration,
        Field(ge=Duration("10ms"), le=Duration("1h"), description="time a new session has to join"),
    ] = Duration("30s")
    start_timeout: Annotated[
        Annotated[Duration, Field(ge=Duration("10ms"), le=Duration("720h"))] | None,
        Null("for ever"),
        Field(description="how long to wait for all workers before the first round"),
    ] = None
    give_up_after: Annotated[
        Annotated[Duration, Field(ge=Duration("10ms"), le=Duration("720h"))] | None,
        Null("never"),
        Field(description="how long the server waits without a session of any worker (then exit code 10)"),
    ] = None
    state: Annotated[
        Durability,
        Field(
            description="what a closed round survives: the server's end (process), also a power failure"
            " (machine: waits for the disk in every round), or neither (off: no resuming)"
        ),
    ] = "process"
    checkpoint_every: Annotated[
        Count,
        Unit("rounds"),
        Field(description="rounds between checkpoints; a restart repeats the log since the last one"),
    ] = 100
    grace: Annotated[
        Duration,
        Field(
            ge=Duration("0s"),
            le=Duration("1h"),
            description="how long a server that is asked to stop waits for its open round",
        ),
    ] = Duration("10s")
    max_sessions: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)],
        Unit("sessions"),
        Field(description="sessions held at once; one more is refused"),
    ] = 4096
    chunk_bytes: Annotated[
        Size,
        Field(ge=Size("4KiB"), le=Size("16MiB"), description="largest piece of a payload in one message"),
    ] = Size("1MiB")
    reorder_buffer: Annotated[
        Size,
        Field(
            ge=Size("4KiB"),
            le=Size("1TiB"),
            description="payload held for workers whose turn to be summed has not come; at least a chunk",
        ),
    ] = Size("32MiB")

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        rules.require(rules.server(dict(self)))
        return self


class Worker(Section):
    """What every worker is told."""

    journal: Annotated[
        Durability,
        Field(
            description="what a worker's report and residual survive, before the report is sent: the"
            " process's end (process), also a power failure (machine: waits for the disk), or neither (off)"
        ),
    ] = "process"

    threads: Annotated[
        Annotated[int, Field(ge=1, le=1024)],
        Unit("threads"),
        Field(description="CPU threads of a gradient; the same number gives the same bits on the same CPU"),
    ] = 1
    batch_oracles: Annotated[
        bool,
        Field(
            description="compute the gradients of a process's workers in one call: faster, but the result"
            " depends on which process hosts which worker"
        ),
    ] = False


class Stragglers(Section):
    """What happens when a worker does not report."""

    policy: Annotated[
        Literal["wait", "skip"],
        Field(
            description="wait for every worker for as long as it takes, or close a step at its deadline"
            " without late workers, whose updates are sent later"
        ),
    ] = "wait"
    deadline: Annotated[
        Annotated[Duration, Field(ge=Duration("10ms"), le=Duration("720h"))] | None,
        Null("not given"),
        Field(description="how long a step stays open for all; with policy: skip, which needs it"),
    ] = None
    quorum: Annotated[
        Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None,
        Unit("share"),
        Null("0.5"),
        Field(
            description="share of the workers whose reports a step needs in any case, rounded up; past the"
            " deadline it waits for them; with policy: skip only"
        ),
    ] = None


class Divergence(Section):
    """When a run has gone wrong."""

    max_loss: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)],
        Unit("loss"),
        Field(description="the highest loss of any worker in an evaluation that counts as normal"),
    ]
    evaluations: Annotated[
        Count,
        Unit("evaluations"),
        Field(description="how many in a row must exceed it before the run ends (exit code 5)"),
    ] = 1


class Faults(Section):
    """What happens when something breaks."""

    stragglers: Annotated[Stragglers, Field(description="what happens when a worker does not report")] = (
        Stragglers()
    )
    non_finite: Annotated[
        Literal["abort", "skip"],
        Field(
            description="on an infinite or NaN loss or gradient: end the run, naming worker and round, or"
            " close the step without the worker, as long as a quorum is left"
        ),
    ] = "abort"
    divergence: Annotated[
        Annotated[Divergence, Accepts("a section with max_loss and evaluations")] | None,
        Null("off"),
        Field(description="end a run whose loss stays too high"),
    ] = None
    lost_residual: Annotated[
        Literal["restart", "refuse"],
        Field(
            description="when a worker comes back without its uplink residual: restart it from zero,"
            " logged and counted, or refuse the worker"
        ),
    ] = "restart"

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        rules.require(rules.faults(self.model_dump()))
        return self


class Config(Section):
    """A whole configuration."""

    workers: Annotated[Count, Unit("workers"), Field(description="m, the number of workers")]
    task: Annotated[Task, Field(description="the learning problem")]
    algorithm: Annotated[Algorithm, Field(description="the algorithm")]
    evaluation: Annotated[Evaluation, Field(description="when the model is evaluated at every worker")] = (
        Evaluation()
    )
    run: Annotated[Run, Field(description="one execution")] = Run()
    server: Annotated[Server, Field(description="the server process")] = Server()
    worker: Annotated[Worker, Field(description="settings that every worker gets from the server")] = Worker()
    faults: Annotated[Faults, Field(description="what happens when something breaks")] = Faults()

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        rules.require(rules.whole(self.model_dump()))
        return self

    @property
    def absence(self) -> AbsencePolicy:
        """Which workers a step may close without."""
        stragglers = self.faults.stragglers
        return AbsencePolicy(
            skips_late=stragglers.policy == "skip",
            skips_non_finite=self.faults.non_finite == "skip",
            quorum=DEFAULT_QUORUM if stragglers.quorum is None else stragglers.quorum,
        )

    @property
    def divergence_watch(self) -> DivergenceWatch | None:
        """What watches the evaluations for divergence; ``None`` unless ``faults.divergence`` is set."""
        divergence = self.faults.divergence
        return None if divergence is None else DivergenceWatch(divergence.max_loss, divergence.evaluations)

    @property
    def eta_q_value(self) -> float:
        """The step size on the dual weights, in 1/loss."""
        return self.algorithm.eta_q_value(self.workers)

    def with_seed(self, seed: int) -> Config:
        """The same configuration with its seed filled in.

        Raises:
            ValueError: if ``seed`` is not in ``[0, 2^128)``.
        """
        return self.model_copy(update={"run": self.run.model_copy(update={"seed": _seed(seed)})})
