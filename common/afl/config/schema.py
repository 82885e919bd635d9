"""The configuration of a run: every key, its type, default, unit, bounds and meaning.

The models are frozen, take no unknown key, and convert nothing silently (``"3"`` is not 3). What several
keys demand of each other is in :mod:`afl.config.rules`. The text under a key is its description, in the docs
and in ``--help-config``.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
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

from afl import names, theory
from afl.config import rules
from afl.config.address import Address, listen_address
from afl.config.compressors import IDENTITY
from afl.config.describe import Accepts, Null, OneOf, Unit
from afl.config.quantities import Duration, Size
from afl.core.algorithms.registry import algorithm_named, algorithm_names, is_installed
from afl.core.algorithms.schedule import CONSTANT, LEAST_FACTOR, MOST_STEPS, Schedule
from afl.core.algorithms.settings import KL_RESTARTS, LEAST_EPSILON, DualChoice, OptimizerChoice
from afl.core.dual import is_rule, rule_named, rule_names
from afl.core.record_privacy import MOST_NOISE, RecordPrivacy
from afl.core.rounds.patience import Patience
from afl.core.rounds.phases import spread_spacing
from afl.core.rounds.policy import DEFAULT_QUORUM, AbsencePolicy, DivergenceWatch, RankBy, is_higher_better
from afl.paths import expanded

BROKEN_RULE: Final = "broken_rule"
"""The pydantic error type under which a model reports broken rules."""


def _seed(value: object) -> int:
    if isinstance(value, str):
        if not re.fullmatch(r"0x[0-9a-f]{1,32}", value, re.IGNORECASE | re.ASCII):
            raise ValueError("as text, a seed is 0x and 1 to 32 hexadecimal digits")
        return int(value, 16)
    if type(value) is not int or not 0 <= value < 1 << 128:
        raise ValueError("a seed is a whole number from 0 to 2^128 - 1")
    return value


def _path(value: object) -> object:
    return expanded(value) if isinstance(value, str) and value and "\0" not in value else value


def _finite(value: JsonValue) -> JsonValue:
    """Only what JSON has: a digest of the configuration and equality of a reloaded one depend on it."""
    json.dumps(value, allow_nan=False)
    return value


def _site_name(name: str) -> str:
    if not names.is_name(name):
        raise ValueError(f"a name of a site has {names.ACCEPTED}")
    return name


def _each_once(each: list[str]) -> list[str]:
    if len(set(each)) < len(each):
        raise ValueError(f"{next(name for name in each if each.count(name) > 1)} appears more than once")
    return each


def installed_algorithm(name: str) -> str:
    """The name; raises what pydantic takes for a wrong one if no such algorithm is installed."""
    if not is_installed(name):
        raise PydanticCustomError("not_installed", "not installed")
    return name


def installed_rule(name: str) -> str:
    """As :func:`installed_algorithm`, of a dual rule."""
    if not is_rule(name):
        raise PydanticCustomError("not_installed", "not installed")
    return name


Count: TypeAlias = Annotated[int, Field(ge=1, le=2**31 - 1)]

Constant: TypeAlias = Annotated[float, Field(ge=1e-12, le=1e12, allow_inf_nan=False)]

Positive: TypeAlias = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]

Noise: TypeAlias = Annotated[float, Field(gt=0, le=MOST_NOISE, allow_inf_nan=False)]

Wait: TypeAlias = Annotated[Duration, Field(ge=Duration("10ms"), le=Duration("720h"))]

Option: TypeAlias = Annotated[JsonValue, AfterValidator(_finite)]

PathName: TypeAlias = Annotated[Path, BeforeValidator(_path)]

Name: TypeAlias = Annotated[str, Field(min_length=1), Accepts("a name")]

SiteName: TypeAlias = Annotated[str, AfterValidator(_site_name)]

Seed: TypeAlias = Annotated[
    int,
    PlainValidator(_seed),
    PlainSerializer(lambda seed: f"0x{seed:032x}", return_type=str),
    Accepts("a whole number from 0 to 2^128 - 1, or 0x and 1 to 32 hexadecimal digits"),
]

ListenAddress: TypeAlias = Annotated[
    Address,
    PlainValidator(listen_address),
    PlainSerializer(str, return_type=str),
    Accepts(
        "host:port: 127.0.0.1:50051, '[::1]:50051' in quotes, :50051 (all addresses); port 0 is any free one"
    ),
]

Durability: TypeAlias = Literal["process", "machine", "off"]
"""What a thing that is written down survives: the process's end, a loss of power too, or nothing."""


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        """For a model made by hand; in a file the rules are checked on the values as they are written."""
        rule = rules.RULES.get(type(self).__name__.lower())
        if rule is not None and (problems := list(rule(self.model_dump()))):
            raise PydanticCustomError(BROKEN_RULE, "{problems}", {"problems": "; ".join(map(str, problems))})
        return self


class Compressor(Section):
    """A compressor and its options."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Option]

    name: Name = IDENTITY
    """the compressor: identity, top-k, rand-k, scaled-sign, projection, dct-projection, or an installed
    one"""

    @property
    def options(self) -> dict[str, JsonValue]:
        """What the compressor is made with."""
        return dict(self.model_extra or {})


CompressorSection: TypeAlias = Annotated[
    Compressor, Accepts("a section with name and the compressor's options")
]


class Task(Section):
    """What is learned."""

    name: Name
    """the task, as installed or as given with --task"""
    options: dict[str, Option] = Field(default_factory=dict)
    """keyword arguments of the task"""
    batch_size: Annotated[Count, Unit("examples")] = 32
    """minibatch of one worker in one round"""
    evaluation_batch_size: Annotated[Count, Unit("examples")] = 1024
    """batch in evaluations; bounds their memory"""
    held_out: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), Unit("share")] = 0.0
    """share of each worker's training examples, drawn from the seed, that never gives gradients; evaluations
    report the model's metrics on them as held_out_NAME"""


class StepSchedule(Section):
    """How the step size on the parameters changes from round to round."""

    warm_up: Annotated[int, Field(ge=0, le=2**31 - 1), Unit("rounds")] = 0
    """rounds in which the step size rises to eta_w in equal steps"""
    then: Literal["constant", "cosine", "steps"] = "constant"
    """what follows: eta_w, half a cosine down from it, or steps down"""
    final: Annotated[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None, Null("0")] = None
    """with cosine: the share of eta_w that it ends at"""
    at: Annotated[
        Annotated[list[Count], Field(max_length=MOST_STEPS), Accepts("a list of rounds, ascending")] | None,
        Unit("rounds"),
        Null("not given"),
    ] = None
    """with steps, which need it: after which rounds the step size is multiplied by factor"""
    factor: Annotated[
        Annotated[float, Field(ge=LEAST_FACTOR, le=1, allow_inf_nan=False)] | None, Null("0.1")
    ] = None
    """with steps: what each step leaves of the step size"""
    eta_q: bool = False
    """whether the step size on the dual weights follows too"""


class Optimizer(Section):
    """How every copy of the model steps along the update D that all receive."""

    name: Literal["sgd", "momentum", "adam"] = "sgd"
    """sgd steps by eta_w D; momentum sums D up, so that its steps are up to 1 / (1 - beta_1) times as long;
    adam divides D's mean by the root of its square's mean, so that eta_w is about a step's length"""
    beta_1: Annotated[Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None, Null("0.9")] = None
    """with momentum or adam: how much of what came before stays"""
    beta_2: Annotated[Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None, Null("0.999")] = None
    """with adam: how much of the mean of squares stays"""
    epsilon: Annotated[
        Annotated[float, Field(ge=LEAST_EPSILON, le=1, allow_inf_nan=False)] | None, Null("1e-8")
    ] = None
    """with adam: what is added to the root"""


class Dual(Section):
    """The rule that moves the dual weights, and its options."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Option]

    name: Annotated[str, OneOf(rule_names), AfterValidator(installed_rule)] = KL_RESTARTS
    """kl-restarts is the paper's; projected is AFL's; cvar serves the worst share of the workers; fixed-share
    and kl-regularized do without restarts; or an installed one of your own"""


class Algorithm(Section):
    """How it is learned: what several algorithms take, and what is the own of the one that is named."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Option]

    name: Annotated[str, OneOf(algorithm_names), AfterValidator(installed_algorithm)]
    """afl-br sends whole vectors; afl-com compresses both ways; sgda, drfa and fedavg are for comparison; or
    an installed one of your own"""
    rounds: Annotated[Count, Unit("rounds")]
    """T, the number of update rounds"""
    block: Annotated[Count | Literal["auto"] | None, Unit("rounds"), Null("auto")] = None
    """B, rounds between two restarts of the dual weights; auto is ceil(sqrt T)"""
    eta_w: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | Literal["theory"]
    """step size on the parameters; theory is 1 / (8 L T^(3/4)) and needs smoothness"""
    eta_q: Annotated[
        Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)] | Literal["theory"] | None,
        Unit("1/loss"),
        Null("not given"),
    ] = None
    """step size on the dual weights, required except for fedavg and kl-regularized; theory is
    2 sqrt(ln m) / (sigma_q T^(1/4)) and needs sigma_q"""
    largest_weight: Annotated[
        Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None, Null("no limit")
    ] = None
    """alpha, the most that a dual weight may be, above 1/m: the worst 1/alpha workers count together instead
    of the single worst, so that none alone steers the model"""
    dual: Annotated[
        Annotated[Dual, Accepts("a section with name and the rule's options")] | None, Null("kl-restarts")
    ] = None
    """how the dual weights follow the losses"""
    dual_loss: Annotated[Literal["training", "held-out"] | None, Null("training")] = None
    """which loss moves a worker's dual weight: that of the minibatch that gave its gradient (drfa: of one of
    its own), or that of a minibatch of the examples that task.held_out holds out"""
    local_steps: Annotated[Annotated[int, Field(ge=1, le=10**6)] | None, Unit("steps"), Null("1")] = None
    """tau, a worker's steps between two synchronizations"""
    sampled: Annotated[Count | None, Unit("workers"), Null("all workers")] = None
    """b, how many workers a synchronization draws"""
    weighting: Annotated[Literal["uniform", "samples"] | None, Null("uniform")] = None
    """how much a worker's model counts: all equally, or by training examples"""
    schedule: Annotated[
        Annotated[StepSchedule, Accepts("a section with warm_up, then and what that takes")] | None,
        Null("constant step sizes"),
    ] = None
    """how the step size on the parameters changes from round to round"""
    optimizer: Annotated[
        Annotated[Optimizer, Accepts("a section with name and what that takes")] | None, Null("sgd")
    ] = None
    """how every copy of the model steps along the update that all receive; with fedavg, how the server steps
    from its model along what is left of it in the mean"""
    server_eta: Annotated[Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None, Null("1")] = (
        None
    )
    """the server's step size in that; of 1 with sgd, its model becomes the mean"""
    final_model: Annotated[Literal["last", "block-mean"] | None, Null("last")] = None
    """the model after the last round, or the mean of those after each of the last B rounds, which is then
    evaluated and saved in its place"""
    weight_decay: Annotated[
        Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None, Null("none")
    ] = None
    """lambda: each update takes eta_w lambda of the parameters away, apart from gradients and compression"""
    clip_norm: Annotated[
        Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] | None, Null("no limit")
    ] = None
    """a worker's gradient with a larger Euclidean norm is scaled down to it, before its dual weight"""
    smoothness: Annotated[Constant | None, Null("not given")] = None
    """L, the smoothness constant of the losses; with eta_w: theory, and only then"""
    sigma_q: Annotated[Constant | None, Unit("loss"), Null("not given")] = None
    """sub-Gaussian parameter of the minibatch loss; with eta_q: theory, and only then"""
    uplink: Annotated[CompressorSection | None, Null("identity")] = None
    """compressor from the workers to the server"""
    downlink: Annotated[CompressorSection | None, Null("the same as uplink")] = None
    """compressor from the server to the workers"""

    def takes(self, option: str) -> bool:
        """Whether the algorithm, with its dual rule, uses an option that several have."""
        return option in rules.taken(algorithm_named(self.name), self.dual_choice.name)

    @property
    def own(self) -> dict[str, Any]:
        """The values of the options that are the algorithm's own, by name, with their defaults."""
        options = algorithm_named(self.name).options
        return {option.name: (self.model_extra or {}).get(option.name, option.default) for option in options}

    @property
    def dual_choice(self) -> DualChoice:
        """The dual rule with all its options."""
        name = KL_RESTARTS if self.dual is None else self.dual.name
        given = {} if self.dual is None else self.dual.model_extra or {}
        options = rule_named(name).options
        return DualChoice(name, {own.name: given.get(own.name, own.default) for own in options})

    @property
    def dual_section(self) -> dict[str, Any]:
        """The dual rule and all its options where it is not the paper's, else nothing."""
        choice = self.dual_choice
        return {} if choice.name == KL_RESTARTS else {"name": choice.name, **choice.options}

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

    @property
    def step_schedule(self) -> Schedule:
        """What the step sizes are multiplied by in each round."""
        if self.schedule is None:
            return CONSTANT
        given = self.schedule.model_dump(exclude_none=True)
        return Schedule(**given | {"at": tuple(given.get("at", ()))})

    @property
    def optimizer_choice(self) -> OptimizerChoice:
        """The optimizer with its constants."""
        return OptimizerChoice(
            **({} if self.optimizer is None else self.optimizer.model_dump(exclude_none=True))
        )

    @property
    def stepping(self) -> dict[str, Any]:
        """What makes steps other than those of the theorems, by key: a schedule, an optimizer, weight decay
        and clipping, each with all constants that it uses and only where it changes something."""
        schedule, optimizer = self.step_schedule, self.optimizer_choice
        changed: dict[str, Any] = {}
        if schedule != CONSTANT:
            changed["schedule"] = rules.used(asdict(schedule), schedule.then, rules.SCHEDULE_KEYS)
        if optimizer.name != "sgd":
            changed["optimizer"] = rules.used(asdict(optimizer), optimizer.name, rules.OPTIMIZER_KEYS)
        for name in ("weight_decay", "clip_norm"):
            if (value := getattr(self, name)) is not None:
                changed[name] = value
        return changed

    @property
    def uplink_compressor(self) -> Compressor:
        """The compressor from the workers to the server."""
        return self.uplink or Compressor()

    @property
    def downlink_compressor(self) -> Compressor:
        """The compressor from the server to the workers."""
        return self.downlink or self.uplink_compressor


class Evaluation(Section):
    """When the model is evaluated at every worker."""

    every: Annotated[Count | Literal["auto"], Unit("rounds")] = 50
    """rounds between evaluations; the last round is always evaluated; auto is near T/40, and such that
    evaluations fall on all places of a block"""
    rank_by: Annotated[Name | None, Null("accuracy where the task reports it, else loss")] = None
    """the task's metric that says which worker is served worst and which model is best, and that charts and
    tables show; of hidden losses only its mean is known, and the best model is that of least smooth loss"""
    better: Annotated[Literal["higher", "lower"] | None, Null("as the metric's name says")] = None
    """which values of rank_by are better; for auc, f1, mae, held_out_loss and the like it need not be said"""
    patience: Annotated[Count | None, Unit("evaluations"), Null("never")] = None
    """end the run, complete, after so many evaluations in a row whose worst held_out_loss (of rank_by: auc,
    held_out_auc) is no better than before; the best model is then chosen by it too; needs task.held_out"""

    @property
    def ranking(self) -> RankBy | None:
        """``rank_by`` and its better end; ``None`` where accuracy or loss ranks."""
        if self.rank_by is None:
            return None
        is_higher = is_higher_better(self.rank_by) if self.better is None else self.better == "higher"
        assert is_higher is not None  # by a rule
        return RankBy(self.rank_by, is_higher)


class Run(Section):
    """One execution."""

    directory: Annotated[PathName | None, Null("runs/ and the run id")] = None
    """where checkpoints and results go; final, random and best models are always saved"""
    seed: Annotated[Seed | None, Null("a fresh one")] = None
    """every random choice of the run is made from it"""
    initial_model: Annotated[PathName | None, Null("the task's model, drawn from the seed")] = None
    """a safetensors file to begin with: a model of another run, or a state_dict of the task's model; only the
    server reads it, once, and resumes without it"""
    description: Annotated[str | None, Null("none")] = None
    """what the data is, in your own words, for the card of an exported model"""
    trackers: Annotated[list[Name], Accepts("a list of names, each once"), AfterValidator(_each_once)] = []
    """where metrics also go: tensorboard, mlflow, wandb, or an installed one; metrics.jsonl is always
    written"""


class Tls(Section):
    """How the server proves who it is, and whether workers must."""

    certificate: PathName
    """the server's certificate and those between it and its authority (PEM); read again when it changes"""
    key: PathName
    """the certificate's private key (PEM, not encrypted)"""
    client_ca: Annotated[PathName | None, Null("none is asked for")] = None
    """authorities of the workers' certificates (PEM), which are then required; a certificate speaks for the
    ids that it names, as in afl:worker:0-9"""
    revoked: Annotated[PathName | None, Null("none")] = None
    """a file of lines serial=HEX and afl:worker:IDS: certificates of these numbers, or for these workers,
    count no longer; read again when it changes; needs client_ca"""


class Server(Section):
    """The server process."""

    listen: ListenAddress = Address("127.0.0.1", 50051)
    """where workers connect (gRPC)"""
    http: Annotated[ListenAddress | None, Null("off")] = Address("127.0.0.1", 9090)
    """where the status page, /status, /metrics, /healthz and /readyz are served"""
    http_hosts: Annotated[list[Name], Accepts("a list of names, each once"), AfterValidator(_each_once)] = []
    """names by which server.http may be asked, beside addresses, localhost and the machine's own name"""
    http_token: Annotated[PathName | None, Null("none is asked for")] = None
    """a file with a token that pages then need, as a bearer or as a password, but for /healthz and /readyz;
    read again when it changes"""
    http_certificate: Annotated[PathName | None, Null("plaintext")] = None
    """the certificate of pages, which are then served over TLS only; it may be that of server.tls; read again
    when it changes"""
    http_key: Annotated[PathName | None, Null("plaintext")] = None
    """the private key of http_certificate (PEM, not encrypted)"""
    tls: Annotated[
        Annotated[Tls, Accepts("a section with certificate, key, client_ca, revoked")] | None,
        Null("plaintext"),
    ] = None
    """encrypt, and let workers know the server by its certificate"""
    tokens: Annotated[PathName | None, Null("none is asked for")] = None
    """a file of lines IDS sha256:HASH: a worker must have a token of such a hash, and speaks for those ids;
    read again when it changes"""
    insecure: bool = False
    """allow plaintext on addresses that other machines can reach"""
    heartbeat: Annotated[Duration, Field(ge=Duration("10ms"), le=Duration("1h"))] = Duration("10s")
    """time between heartbeats, both ways"""
    peer_timeout: Annotated[Duration, Field(ge=Duration("20ms"), le=Duration("24h"))] = Duration("60s")
    """silence that ends a session, at least two heartbeats; a long step is not silence"""
    handshake_timeout: Annotated[Duration, Field(ge=Duration("10ms"), le=Duration("1h"))] = Duration("30s")
    """time a new session has to join"""
    start_timeout: Annotated[Wait | None, Null("for ever")] = None
    """how long to wait for all workers before the first round"""
    give_up_after: Annotated[Wait | None, Null("never")] = None
    """how long the server waits without a session of any worker (then exit code 10)"""
    state: Durability = "process"
    """what a closed round survives: the server's end (process), also a power failure (machine: waits for the
    disk in every round), or neither (off: no resuming)"""
    integrity_key: Annotated[PathName | None, Null("none")] = None
    """a file with a key, outside of the run's directory, that seals checkpoints and log: what is not sealed
    with it counts as damaged; the same for the whole run"""
    checkpoint_every: Annotated[Count, Unit("rounds")] = 100
    """rounds between checkpoints; a restart repeats the log since the last one"""
    grace: Annotated[Duration, Field(ge=Duration("0s"), le=Duration("1h"))] = Duration("10s")
    """how long a server that is asked to stop waits for its open round"""
    max_sessions: Annotated[int, Field(ge=1, le=1_000_000), Unit("sessions")] = 4096
    """sessions held at once; one more is refused"""
    chunk_bytes: Annotated[Size, Field(ge=Size("4KiB"), le=Size("16MiB"))] = Size("1MiB")
    """largest piece of a payload in one message"""
    reorder_buffer: Annotated[Size, Field(ge=Size("4KiB"), le=Size("1TiB"))] = Size("32MiB")
    """payload held for workers whose turn to be summed has not come; at least a chunk"""

    @property
    def page_scheme(self) -> str:
        """How pages are asked for: ``http`` or ``https``."""
        return "http" if self.http_certificate is None else "https"


class Worker(Section):
    """What every worker is told."""

    journal: Durability = "process"
    """what a worker's report and residual survive, before the report is sent: the process's end (process),
    also a power failure (machine: waits for the disk), or neither (off)"""
    threads: Annotated[int, Field(ge=1, le=1024), Unit("threads")] = 1
    """CPU threads of a gradient; the same number gives the same bits on the same CPU"""
    batch_oracles: bool = False
    """compute the gradients of a process's workers in one call: faster, but the result depends on which
    process hosts which worker"""


class Stragglers(Section):
    """What happens when a worker does not report."""

    policy: Literal["wait", "skip"] = "wait"
    """wait for every worker for as long as it takes, or close a step at its deadline without late workers,
    whose updates are sent later"""
    deadline: Annotated[Wait | None, Null("not given")] = None
    """how long a step stays open for all; with policy: skip, which needs it"""
    quorum: Annotated[
        Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None, Unit("share"), Null("0.5")
    ] = None
    """share of the workers whose reports a step needs in any case, rounded up; past the deadline it waits for
    them; with policy: skip only"""


class Divergence(Section):
    """When a run has gone wrong."""

    max_loss: Annotated[float, Field(gt=0, allow_inf_nan=False), Unit("loss")]
    """the highest loss of any worker in an evaluation that counts as normal"""
    evaluations: Annotated[Count, Unit("evaluations")] = 1
    """how many in a row must exceed it before the run ends (exit code 5)"""


class UpdateNorm(Section):
    """When an update is too large."""

    times: Annotated[float, Field(gt=1, le=1e6, allow_inf_nan=False)] = 10.0
    """how many times the median of the others' gradients a worker's may be, for each unit of dual weight"""


class Faults(Section):
    """What happens when something breaks."""

    stragglers: Stragglers = Stragglers()
    """what happens when a worker does not report"""
    non_finite: Literal["abort", "skip"] = "abort"
    """on an infinite or NaN loss or gradient: end the run, naming worker and round, or close the step without
    the worker, as long as a quorum is left"""
    divergence: Annotated[
        Annotated[Divergence, Accepts("a section with max_loss and evaluations")] | None, Null("off")
    ] = None
    """end a run whose loss stays too high"""
    loss_cap: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, Unit("loss"), Null("no limit")
    ] = None
    """a worker's loss beyond it counts as this much, and below its negative as that, when the dual weights
    move; set it above every right loss, say at ten times the first"""
    update_norm: Annotated[Annotated[UpdateNorm, Accepts("a section with times")] | None, Null("off")] = None
    """leave an update out whose norm is far beyond the others', as long as a quorum is left; keeps the whole
    payloads of a step until it closes, and sends nothing before"""
    lost_residual: Literal["restart", "refuse"] = "restart"
    """when a worker comes back without its uplink residual: restart it from zero, logged and counted, or
    refuse the worker"""


class Records(Section):
    """How each site protects each of its records, against everybody."""

    clip: Positive = 1.0
    """the largest norm of a record's gradient; a longer one is shortened to it"""
    noise: Annotated[Noise | None, Null("by epsilon")] = None
    """standard deviation of the noise on a minibatch's sum of gradients, in units of clip"""
    loss_clip: Annotated[Positive, Unit("loss")] = 5.0
    """the largest loss of a record that counts; one below 0 counts as 0"""
    loss_noise: Annotated[Noise | None, Null("1.5 times noise")] = None
    """standard deviation of the noise on a minibatch's sum of losses, in units of loss_clip; with noise
    only"""
    epsilon: Annotated[
        Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] | None, Null("by noise")
    ] = None
    """the most that the run's rounds may cost a record, in place of noise: each site computes its noise"""
    delta: Annotated[float, Field(gt=0, le=0.1, allow_inf_nan=False)]
    """what epsilon is stated for; well below 1 / records of the smallest site, such as 1e-5"""
    metrics: Literal["full", "noised"] = "full"
    """what evaluations tell of test records: the task's metrics as they are; or means over single records of
    values from 0 to 1, of the loss from 0 to loss_clip, with noise and an epsilon of their own"""
    metric_noise: Noise = 10.0
    """standard deviation of the noise on the sums of test records' metrics, in units of the most by which one
    record moves them; with metrics: noised"""


class Privacy(Section):
    """What the server does not learn."""

    secure_aggregation: bool = False
    """workers mask their messages, so that the server can read only their sum; needs bits at the uplink"""
    losses: Literal["shown", "hidden"] = "shown"
    """whether the server learns each worker's loss, dual weight and metrics, or only sums of them; hidden
    needs secure_aggregation"""
    records: Annotated[
        Annotated[Records, Accepts("a section with delta and either noise or epsilon")] | None, Null("off")
    ] = None
    """record-level differential privacy, accounted at each site; its metrics on test data are told in full"""

    @property
    def record_privacy(self) -> RecordPrivacy | None:
        """``privacy.records`` as the workers are told it."""
        if self.records is None:
            return None
        told = self.records.model_dump(exclude={"metrics", "metric_noise"})
        noise = self.records.metric_noise if self.records.metrics == "noised" else None
        return RecordPrivacy(**told, metric_noise=noise)

    @property
    def record_words(self) -> str:
        """What to know wherever an epsilon is shown; empty without ``records``."""
        if self.records is None:
            return ""
        noise, epsilon, delta = self.records.noise, self.records.epsilon, self.records.delta
        asked = f"noise {noise:g}" if epsilon is None else f"epsilon {epsilon:g}"
        has = "no noise" if self.records.metrics == "full" else f"noise {self.records.metric_noise:g}"
        return (
            f"{asked} at delta {delta:g}, for one record that is replaced; what is measured on test data has "
            f"{has}"
        )


class Config(Section):
    """A whole configuration."""

    workers: Annotated[Count, Unit("workers")]
    """m, the number of workers"""
    sites: Annotated[
        Annotated[
            list[SiteName],
            Accepts("a list of names, one for each worker, each once"),
            AfterValidator(_each_once),
        ]
        | None,
        Null("none"),
    ] = None
    """what people call the workers' sites, by worker id; shown beside the ids, which stay what counts"""
    task: Task
    """the learning problem"""
    algorithm: Algorithm
    """the algorithm"""
    evaluation: Evaluation = Evaluation()
    """when the model is evaluated at every worker"""
    run: Run = Run()
    """one execution"""
    server: Server = Server()
    """the server process"""
    worker: Worker = Worker()
    """settings that every worker gets from the server"""
    faults: Faults = Faults()
    """what happens when something breaks"""
    privacy: Privacy = Privacy()
    """what the server does not learn"""

    @property
    def names(self) -> dict[int, str]:
        """The sites' names by worker; empty where there are none."""
        return dict(enumerate(self.sites or ()))

    @property
    def absence(self) -> AbsencePolicy:
        """Which workers a step may close without."""
        stragglers = self.faults.stragglers
        return AbsencePolicy(
            skips_late=stragglers.policy == "skip",
            skips_non_finite=self.faults.non_finite == "skip",
            update_norm=None if self.faults.update_norm is None else self.faults.update_norm.times,
            quorum=DEFAULT_QUORUM if stragglers.quorum is None else stragglers.quorum,
        )

    @property
    def divergence_watch(self) -> DivergenceWatch | None:
        """What watches the evaluations for divergence; ``None`` unless ``faults.divergence`` is set."""
        divergence = self.faults.divergence
        return None if divergence is None else DivergenceWatch(divergence.max_loss, divergence.evaluations)

    @property
    def patience(self) -> Patience | None:
        """What ends the run before its last round; ``None`` unless ``evaluation.patience`` is set."""
        evaluation = self.evaluation
        return None if evaluation.patience is None else Patience(evaluation.patience, evaluation.ranking)

    @property
    def loss_cap(self) -> float:
        """``faults.loss_cap``; infinite where there is none."""
        return math.inf if self.faults.loss_cap is None else self.faults.loss_cap

    @property
    def evaluate_every(self) -> int:
        """Update rounds between two evaluations."""
        every, algorithm = self.evaluation.every, self.algorithm
        return spread_spacing(algorithm.rounds, algorithm.restart_length) if every == "auto" else every

    @property
    def planned_evaluations(self) -> int:
        """Evaluations of a run of all rounds; several that fall into one synchronization are one."""
        rounds, every, steps = self.algorithm.rounds, self.evaluate_every, self.algorithm.local_steps or 1
        synchronizations = -(-rounds // steps)
        if every <= steps:
            return synchronizations
        before_the_end = (rounds - 1) // every
        return before_the_end + (-(-before_the_end * every // steps) < synchronizations)

    @property
    def eta_q_value(self) -> float:
        """The step size on the dual weights, in 1/loss."""
        algorithm = self.algorithm
        if algorithm.eta_q != "theory":
            return algorithm.eta_q or 0.0
        assert algorithm.sigma_q is not None
        return theory.dual_step(algorithm.rounds, self.workers, algorithm.sigma_q)

    def with_seed(self, seed: int) -> Config:
        """The same configuration with its seed filled in.

        Raises:
            ValueError: if ``seed`` is not in ``[0, 2^128)``.
        """
        return self.model_copy(update={"run": self.run.model_copy(update={"seed": _seed(seed)})})
