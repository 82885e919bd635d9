from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_TRAIN: _ClassVar[Kind]
    KIND_EVALUATE: _ClassVar[Kind]
    KIND_MODEL: _ClassVar[Kind]
    KIND_LOSS: _ClassVar[Kind]
    KIND_BUFFERS: _ClassVar[Kind]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_UPDATE: _ClassVar[Role]
    ROLE_MODEL: _ClassVar[Role]
    ROLE_FROZEN: _ClassVar[Role]
    ROLE_SNAPSHOT: _ClassVar[Role]
    ROLE_BUFFERS: _ClassVar[Role]
    ROLE_ITERATE: _ClassVar[Role]
    ROLE_GRID: _ClassVar[Role]
    ROLE_WEIGHT: _ClassVar[Role]
    ROLE_METRICS: _ClassVar[Role]
    ROLE_OPTIMIZER: _ClassVar[Role]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_DENSE: _ClassVar[Encoding]
    ENCODING_INDEXED: _ClassVar[Encoding]
    ENCODING_SEEDED: _ClassVar[Encoding]
    ENCODING_SIGNS: _ClassVar[Encoding]

class ValueType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VALUE_TYPE_UNSPECIFIED: _ClassVar[ValueType]
    VALUE_TYPE_FLOAT32: _ClassVar[ValueType]
    VALUE_TYPE_BYTES: _ClassVar[ValueType]
    VALUE_TYPE_MODULAR: _ClassVar[ValueType]
    VALUE_TYPE_INTEGER: _ClassVar[ValueType]

class IndexCoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_CODING_UNSPECIFIED: _ClassVar[IndexCoding]
    INDEX_CODING_BITMAP: _ClassVar[IndexCoding]
    INDEX_CODING_PACKED: _ClassVar[IndexCoding]
    INDEX_CODING_RICE: _ClassVar[IndexCoding]
KIND_UNSPECIFIED: Kind
KIND_TRAIN: Kind
KIND_EVALUATE: Kind
KIND_MODEL: Kind
KIND_LOSS: Kind
KIND_BUFFERS: Kind
ROLE_UNSPECIFIED: Role
ROLE_UPDATE: Role
ROLE_MODEL: Role
ROLE_FROZEN: Role
ROLE_SNAPSHOT: Role
ROLE_BUFFERS: Role
ROLE_ITERATE: Role
ROLE_GRID: Role
ROLE_WEIGHT: Role
ROLE_METRICS: Role
ROLE_OPTIMIZER: Role
ENCODING_UNSPECIFIED: Encoding
ENCODING_DENSE: Encoding
ENCODING_INDEXED: Encoding
ENCODING_SEEDED: Encoding
ENCODING_SIGNS: Encoding
VALUE_TYPE_UNSPECIFIED: ValueType
VALUE_TYPE_FLOAT32: ValueType
VALUE_TYPE_BYTES: ValueType
VALUE_TYPE_MODULAR: ValueType
VALUE_TYPE_INTEGER: ValueType
INDEX_CODING_UNSPECIFIED: IndexCoding
INDEX_CODING_BITMAP: IndexCoding
INDEX_CODING_PACKED: IndexCoding
INDEX_CODING_RICE: IndexCoding

class WorkerFrame(_message.Message):
    __slots__ = ("join", "ready", "reports", "chunks", "heartbeat", "failure", "goodbye")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    ready: Ready
    reports: _containers.RepeatedCompositeFieldContainer[Report]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    heartbeat: Heartbeat
    failure: Failure
    goodbye: Goodbye
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., reports: _Optional[_Iterable[_Union[Report, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("welcome", "step", "chunks", "commit", "acks", "heartbeat", "goodbye", "roster")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: Step
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    commit: Commit
    acks: _containers.RepeatedCompositeFieldContainer[Ack]
    heartbeat: Heartbeat
    goodbye: Goodbye
    roster: Roster
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., acks: _Optional[_Iterable[_Union[Ack, _Mapping]]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., roster: _Optional[_Union[Roster, _Mapping]] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("round", "phase")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    round: int
    phase: int
    def __init__(self, round: _Optional[int] = ..., phase: _Optional[int] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("protocol", "package_version", "incarnation", "run_id", "task", "layout_hash", "applied", "workers", "sites", "oldest_protocol")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    package_version: str
    incarnation: bytes
    run_id: str
    task: str
    layout_hash: bytes
    applied: Position
    workers: _containers.RepeatedScalarFieldContainer[int]
    sites: _containers.RepeatedScalarFieldContainer[str]
    oldest_protocol: int
    def __init__(self, protocol: _Optional[int] = ..., package_version: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., run_id: _Optional[str] = ..., task: _Optional[str] = ..., layout_hash: _Optional[bytes] = ..., applied: _Optional[_Union[Position, _Mapping]] = ..., workers: _Optional[_Iterable[int]] = ..., sites: _Optional[_Iterable[str]] = ..., oldest_protocol: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("worker", "reported")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    worker: int
    reported: Position
    def __init__(self, worker: _Optional[int] = ..., reported: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "server_version", "settings", "seed", "workers", "buffers_averaged", "key_epoch", "frozen_digest", "protocol")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_AVERAGED_FIELD_NUMBER: _ClassVar[int]
    KEY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FROZEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    server_version: str
    settings: RunSettings
    seed: bytes
    workers: _containers.RepeatedCompositeFieldContainer[Expectation]
    buffers_averaged: Position
    key_epoch: int
    frozen_digest: str
    protocol: int
    def __init__(self, run_id: _Optional[str] = ..., server_version: _Optional[str] = ..., settings: _Optional[_Union[RunSettings, _Mapping]] = ..., seed: _Optional[bytes] = ..., workers: _Optional[_Iterable[_Union[Expectation, _Mapping]]] = ..., buffers_averaged: _Optional[_Union[Position, _Mapping]] = ..., key_epoch: _Optional[int] = ..., frozen_digest: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class Expectation(_message.Message):
    __slots__ = ("worker", "position", "held", "payload", "offset", "others")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    position: Position
    held: bool
    payload: int
    offset: int
    others: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., held: bool = ..., payload: _Optional[int] = ..., offset: _Optional[int] = ..., others: _Optional[_Iterable[int]] = ...) -> None: ...

class RunSettings(_message.Message):
    __slots__ = ("workers", "task", "task_options", "batch_size", "evaluation_batch_size", "threads", "algorithm", "rounds", "eta_w", "uplink", "downlink", "algorithm_options", "chunk_bytes", "heartbeat_seconds", "peer_timeout_seconds", "batch_oracles", "journal", "skips_non_finite", "secure_aggregation", "hides_losses", "single_reports")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TASK_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ETA_W_FIELD_NUMBER: _ClassVar[int]
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEER_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ORACLES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    SKIPS_NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    SECURE_AGGREGATION_FIELD_NUMBER: _ClassVar[int]
    HIDES_LOSSES_FIELD_NUMBER: _ClassVar[int]
    SINGLE_REPORTS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    task: str
    task_options: str
    batch_size: int
    evaluation_batch_size: int
    threads: int
    algorithm: str
    rounds: int
    eta_w: float
    uplink: CompressorSettings
    downlink: CompressorSettings
    algorithm_options: str
    chunk_bytes: int
    heartbeat_seconds: float
    peer_timeout_seconds: float
    batch_oracles: bool
    journal: str
    skips_non_finite: bool
    secure_aggregation: bool
    hides_losses: bool
    single_reports: bool
    def __init__(self, workers: _Optional[int] = ..., task: _Optional[str] = ..., task_options: _Optional[str] = ..., batch_size: _Optional[int] = ..., evaluation_batch_size: _Optional[int] = ..., threads: _Optional[int] = ..., algorithm: _Optional[str] = ..., rounds: _Optional[int] = ..., eta_w: _Optional[float] = ..., uplink: _Optional[_Union[CompressorSettings, _Mapping]] = ..., downlink: _Optional[_Union[CompressorSettings, _Mapping]] = ..., algorithm_options: _Optional[str] = ..., chunk_bytes: _Optional[int] = ..., heartbeat_seconds: _Optional[float] = ..., peer_timeout_seconds: _Optional[float] = ..., batch_oracles: bool = ..., journal: _Optional[str] = ..., skips_non_finite: bool = ..., secure_aggregation: bool = ..., hides_losses: bool = ..., single_reports: bool = ...) -> None: ...

class CompressorSettings(_message.Message):
    __slots__ = ("name", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: str
    def __init__(self, name: _Optional[str] = ..., options: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("layout_hash", "dim", "realization_digest", "workers", "partial", "keys", "frozen_digest")
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    REALIZATION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    layout_hash: bytes
    dim: int
    realization_digest: bytes
    workers: _containers.RepeatedCompositeFieldContainer[Standing]
    partial: PartialStep
    keys: KeyOffer
    frozen_digest: str
    def __init__(self, layout_hash: _Optional[bytes] = ..., dim: _Optional[int] = ..., realization_digest: _Optional[bytes] = ..., workers: _Optional[_Iterable[_Union[Standing, _Mapping]]] = ..., partial: _Optional[_Union[PartialStep, _Mapping]] = ..., keys: _Optional[_Union[KeyOffer, _Mapping]] = ..., frozen_digest: _Optional[str] = ...) -> None: ...

class KeyOffer(_message.Message):
    __slots__ = ("epoch", "workers", "public_keys", "signature", "certificates", "signer", "roster")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEYS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    public_keys: _containers.RepeatedScalarFieldContainer[bytes]
    signature: bytes
    certificates: _containers.RepeatedScalarFieldContainer[bytes]
    signer: bytes
    roster: bytes
    def __init__(self, epoch: _Optional[int] = ..., workers: _Optional[_Iterable[int]] = ..., public_keys: _Optional[_Iterable[bytes]] = ..., signature: _Optional[bytes] = ..., certificates: _Optional[_Iterable[bytes]] = ..., signer: _Optional[bytes] = ..., roster: _Optional[bytes] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("epoch", "offers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    offers: _containers.RepeatedCompositeFieldContainer[KeyOffer]
    def __init__(self, epoch: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[KeyOffer, _Mapping]]] = ...) -> None: ...

class PartialStep(_message.Message):
    __slots__ = ("position", "kind", "payload", "offset", "digest")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    position: Position
    kind: Kind
    payload: int
    offset: int
    digest: bytes
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., kind: _Optional[_Union[Kind, str]] = ..., payload: _Optional[int] = ..., offset: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("role", "encoding", "value_type", "dim", "count", "index_coding", "index_parameter", "index_bytes", "value_bytes", "bits")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    VALUE_TYPE_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    INDEX_CODING_FIELD_NUMBER: _ClassVar[int]
    INDEX_PARAMETER_FIELD_NUMBER: _ClassVar[int]
    INDEX_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    encoding: Encoding
    value_type: ValueType
    dim: int
    count: int
    index_coding: IndexCoding
    index_parameter: int
    index_bytes: int
    value_bytes: int
    bits: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., value_type: _Optional[_Union[ValueType, str]] = ..., dim: _Optional[int] = ..., count: _Optional[int] = ..., index_coding: _Optional[_Union[IndexCoding, str]] = ..., index_parameter: _Optional[int] = ..., index_bytes: _Optional[int] = ..., value_bytes: _Optional[int] = ..., bits: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("worker", "payload", "offset", "data")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    worker: int
    payload: int
    offset: int
    data: bytes
    def __init__(self, worker: _Optional[int] = ..., payload: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("position", "kind", "payloads", "goes_on")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    position: Position
    kind: Kind
    payloads: _containers.RepeatedCompositeFieldContainer[Payload]
    goes_on: bool
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., kind: _Optional[_Union[Kind, str]] = ..., payloads: _Optional[_Iterable[_Union[Payload, _Mapping]]] = ..., goes_on: bool = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("position", "dual_weights", "workers")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DUAL_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    position: Position
    dual_weights: _containers.RepeatedScalarFieldContainer[float]
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., dual_weights: _Optional[_Iterable[float]] = ..., workers: _Optional[_Iterable[int]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("worker", "position", "loss", "examples", "payloads", "metrics", "model_digest", "weight", "missing", "residual_norm", "others", "tensor_residual_norms")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_NORM_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_RESIDUAL_NORMS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    position: Position
    loss: float
    examples: int
    payloads: _containers.RepeatedCompositeFieldContainer[Payload]
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    model_digest: bytes
    weight: float
    missing: str
    residual_norm: float
    others: _containers.RepeatedCompositeFieldContainer[Share]
    tensor_residual_norms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, worker: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., loss: _Optional[float] = ..., examples: _Optional[int] = ..., payloads: _Optional[_Iterable[_Union[Payload, _Mapping]]] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., model_digest: _Optional[bytes] = ..., weight: _Optional[float] = ..., missing: _Optional[str] = ..., residual_norm: _Optional[float] = ..., others: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., tensor_residual_norms: _Optional[_Iterable[float]] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("worker", "loss", "examples")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    worker: int
    loss: float
    examples: int
    def __init__(self, worker: _Optional[int] = ..., loss: _Optional[float] = ..., examples: _Optional[int] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("worker", "position", "status", "reason", "others")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Ack.Status]
        STATUS_ACCEPTED: _ClassVar[Ack.Status]
        STATUS_DUPLICATE: _ClassVar[Ack.Status]
        STATUS_LATE: _ClassVar[Ack.Status]
        STATUS_REFUSED: _ClassVar[Ack.Status]
    STATUS_UNSPECIFIED: Ack.Status
    STATUS_ACCEPTED: Ack.Status
    STATUS_DUPLICATE: Ack.Status
    STATUS_LATE: Ack.Status
    STATUS_REFUSED: Ack.Status
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    worker: int
    position: Position
    status: Ack.Status
    reason: str
    others: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., status: _Optional[_Union[Ack.Status, str]] = ..., reason: _Optional[str] = ..., others: _Optional[_Iterable[int]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("reply_wanted", "is_reply")
    REPLY_WANTED_FIELD_NUMBER: _ClassVar[int]
    IS_REPLY_FIELD_NUMBER: _ClassVar[int]
    reply_wanted: bool
    is_reply: bool
    def __init__(self, reply_wanted: bool = ..., is_reply: bool = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("worker", "position", "cause", "message", "traceback")
    class Cause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CAUSE_UNSPECIFIED: _ClassVar[Failure.Cause]
        CAUSE_TASK: _ClassVar[Failure.Cause]
        CAUSE_NON_FINITE: _ClassVar[Failure.Cause]
        CAUSE_OUT_OF_MEMORY: _ClassVar[Failure.Cause]
        CAUSE_HELPER_KILLED: _ClassVar[Failure.Cause]
        CAUSE_INTERNAL: _ClassVar[Failure.Cause]
    CAUSE_UNSPECIFIED: Failure.Cause
    CAUSE_TASK: Failure.Cause
    CAUSE_NON_FINITE: Failure.Cause
    CAUSE_OUT_OF_MEMORY: Failure.Cause
    CAUSE_HELPER_KILLED: Failure.Cause
    CAUSE_INTERNAL: Failure.Cause
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    worker: int
    position: Position
    cause: Failure.Cause
    message: str
    traceback: str
    def __init__(self, worker: _Optional[int] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., cause: _Optional[_Union[Failure.Cause, str]] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("status", "reason", "run_id")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATUS_UNSPECIFIED: _ClassVar[Goodbye.Status]
        STATUS_FINISHED: _ClassVar[Goodbye.Status]
        STATUS_REFUSED: _ClassVar[Goodbye.Status]
        STATUS_TRY_LATER: _ClassVar[Goodbye.Status]
        STATUS_ABORTED: _ClassVar[Goodbye.Status]
        STATUS_LEAVING: _ClassVar[Goodbye.Status]
        STATUS_OTHER_VERSION: _ClassVar[Goodbye.Status]
    STATUS_UNSPECIFIED: Goodbye.Status
    STATUS_FINISHED: Goodbye.Status
    STATUS_REFUSED: Goodbye.Status
    STATUS_TRY_LATER: Goodbye.Status
    STATUS_ABORTED: Goodbye.Status
    STATUS_LEAVING: Goodbye.Status
    STATUS_OTHER_VERSION: Goodbye.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    status: Goodbye.Status
    reason: str
    run_id: str
    def __init__(self, status: _Optional[_Union[Goodbye.Status, str]] = ..., reason: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...
