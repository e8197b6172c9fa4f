from paramserver.v1 import parameter_store_pb2 as _parameter_store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("changed", "restart_needed")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    RESTART_NEEDED_FIELD_NUMBER: _ClassVar[int]
    changed: _containers.RepeatedScalarFieldContainer[str]
    restart_needed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, changed: _Optional[_Iterable[str]] = ..., restart_needed: _Optional[_Iterable[str]] = ...) -> None: ...

class ListStepsRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListStepsResponse(_message.Message):
    __slots__ = ("steps", "state_dir")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[StepInfo]
    state_dir: str
    def __init__(self, steps: _Optional[_Iterable[_Union[StepInfo, _Mapping]]] = ..., state_dir: _Optional[str] = ...) -> None: ...

class StepInfo(_message.Message):
    __slots__ = ("step", "layout", "world_size", "committed_at_unix_seconds", "newest", "retained", "durable", "kept_as", "readers", "bytes", "alone_bytes", "settled")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    KEPT_AS_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ALONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    step: int
    layout: str
    world_size: int
    committed_at_unix_seconds: float
    newest: bool
    retained: bool
    durable: bool
    kept_as: _containers.RepeatedScalarFieldContainer[str]
    readers: int
    bytes: _containers.RepeatedCompositeFieldContainer[JobInfo.TierBytes]
    alone_bytes: int
    settled: bool
    def __init__(self, step: _Optional[int] = ..., layout: _Optional[str] = ..., world_size: _Optional[int] = ..., committed_at_unix_seconds: _Optional[float] = ..., newest: _Optional[bool] = ..., retained: _Optional[bool] = ..., durable: _Optional[bool] = ..., kept_as: _Optional[_Iterable[str]] = ..., readers: _Optional[int] = ..., bytes: _Optional[_Iterable[_Union[JobInfo.TierBytes, _Mapping]]] = ..., alone_bytes: _Optional[int] = ..., settled: _Optional[bool] = ...) -> None: ...

class GetPrefetchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPrefetchResponse(_message.Message):
    __slots__ = ("in_flight_bytes", "in_flight_budget_bytes", "running", "waiting", "demands", "hits", "misses", "windows", "jobs")
    class Window(_message.Message):
        __slots__ = ("client", "job", "rank", "slabs", "bytes", "present", "running", "waiting")
        CLIENT_FIELD_NUMBER: _ClassVar[int]
        JOB_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        SLABS_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        PRESENT_FIELD_NUMBER: _ClassVar[int]
        RUNNING_FIELD_NUMBER: _ClassVar[int]
        WAITING_FIELD_NUMBER: _ClassVar[int]
        client: str
        job: str
        rank: int
        slabs: int
        bytes: int
        present: int
        running: int
        waiting: int
        def __init__(self, client: _Optional[str] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., slabs: _Optional[int] = ..., bytes: _Optional[int] = ..., present: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...
    class Fetched(_message.Message):
        __slots__ = ("job", "bytes", "seconds")
        JOB_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        SECONDS_FIELD_NUMBER: _ClassVar[int]
        job: str
        bytes: int
        seconds: float
        def __init__(self, job: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    DEMANDS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    in_flight_bytes: int
    in_flight_budget_bytes: int
    running: int
    waiting: int
    demands: int
    hits: int
    misses: int
    windows: _containers.RepeatedCompositeFieldContainer[GetPrefetchResponse.Window]
    jobs: _containers.RepeatedCompositeFieldContainer[GetPrefetchResponse.Fetched]
    def __init__(self, in_flight_bytes: _Optional[int] = ..., in_flight_budget_bytes: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., demands: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., windows: _Optional[_Iterable[_Union[GetPrefetchResponse.Window, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[GetPrefetchResponse.Fetched, _Mapping]]] = ...) -> None: ...

class ListEventsRequest(_message.Message):
    __slots__ = ("limit", "after", "kinds")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after: int
    kinds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, limit: _Optional[int] = ..., after: _Optional[int] = ..., kinds: _Optional[_Iterable[str]] = ...) -> None: ...

class ListEventsResponse(_message.Message):
    __slots__ = ("events", "epoch")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    epoch: str
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., epoch: _Optional[str] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "unix_seconds", "kind", "subject", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_seconds: float
    kind: str
    subject: str
    text: str
    def __init__(self, number: _Optional[int] = ..., unix_seconds: _Optional[float] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("keys",)
    class Key(_message.Message):
        __slots__ = ("key", "value", "is_default")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        is_default: bool
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., is_default: _Optional[bool] = ...) -> None: ...
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[GetConfigResponse.Key]
    def __init__(self, keys: _Optional[_Iterable[_Union[GetConfigResponse.Key, _Mapping]]] = ...) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionResponse(_message.Message):
    __slots__ = ("version", "epoch", "state_dir", "host", "pid", "started_at_unix_seconds", "python", "torch", "grpc", "catalog_format", "build")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    TORCH_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    CATALOG_FORMAT_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    version: str
    epoch: str
    state_dir: str
    host: str
    pid: int
    started_at_unix_seconds: float
    python: str
    torch: str
    grpc: str
    catalog_format: int
    build: str
    def __init__(self, version: _Optional[str] = ..., epoch: _Optional[str] = ..., state_dir: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., started_at_unix_seconds: _Optional[float] = ..., python: _Optional[str] = ..., torch: _Optional[str] = ..., grpc: _Optional[str] = ..., catalog_format: _Optional[int] = ..., build: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("verified_bytes", "total_bytes", "damage")
    class Damage(_message.Message):
        __slots__ = ("version", "offset", "bytes", "fqns", "text")
        VERSION_FIELD_NUMBER: _ClassVar[int]
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        FQNS_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        version: str
        offset: int
        bytes: int
        fqns: _containers.RepeatedScalarFieldContainer[str]
        text: str
        def __init__(self, version: _Optional[str] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., fqns: _Optional[_Iterable[str]] = ..., text: _Optional[str] = ...) -> None: ...
    VERIFIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    verified_bytes: int
    total_bytes: int
    damage: _containers.RepeatedCompositeFieldContainer[VerifyResponse.Damage]
    def __init__(self, verified_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., damage: _Optional[_Iterable[_Union[VerifyResponse.Damage, _Mapping]]] = ...) -> None: ...

class EvictCopiesRequest(_message.Message):
    __slots__ = ("job", "all_jobs")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ALL_JOBS_FIELD_NUMBER: _ClassVar[int]
    job: str
    all_jobs: bool
    def __init__(self, job: _Optional[str] = ..., all_jobs: _Optional[bool] = ...) -> None: ...

class EvictCopiesResponse(_message.Message):
    __slots__ = ("copies", "bytes", "left_bytes")
    COPIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    copies: int
    bytes: int
    left_bytes: int
    def __init__(self, copies: _Optional[int] = ..., bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ...) -> None: ...

class PromoteJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class PromoteJobResponse(_message.Message):
    __slots__ = ("slabs", "bytes", "present_bytes", "left_bytes")
    SLABS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    slabs: int
    bytes: int
    present_bytes: int
    left_bytes: int
    def __init__(self, slabs: _Optional[int] = ..., bytes: _Optional[int] = ..., present_bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ...) -> None: ...

class RollBackJobRequest(_message.Message):
    __slots__ = ("job", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RollBackJobResponse(_message.Message):
    __slots__ = ("former_step",)
    FORMER_STEP_FIELD_NUMBER: _ClassVar[int]
    former_step: int
    def __init__(self, former_step: _Optional[int] = ...) -> None: ...

class BeginCopyRequest(_message.Message):
    __slots__ = ("job", "run_id", "origin", "source")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    job: str
    run_id: str
    origin: str
    source: str
    def __init__(self, job: _Optional[str] = ..., run_id: _Optional[str] = ..., origin: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class BeginCopyResponse(_message.Message):
    __slots__ = ("resumes",)
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    resumes: bool
    def __init__(self, resumes: _Optional[bool] = ...) -> None: ...

class ReportReplicaRequest(_message.Message):
    __slots__ = ("job", "holder", "step", "sent_bytes", "copy_seconds", "problem", "finishing")
    JOB_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    FINISHING_FIELD_NUMBER: _ClassVar[int]
    job: str
    holder: str
    step: int
    sent_bytes: int
    copy_seconds: float
    problem: str
    finishing: bool
    def __init__(self, job: _Optional[str] = ..., holder: _Optional[str] = ..., step: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., copy_seconds: _Optional[float] = ..., problem: _Optional[str] = ..., finishing: _Optional[bool] = ...) -> None: ...

class ReportReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDrainResponse(_message.Message):
    __slots__ = ("draining", "since_unix_seconds", "sessions", "waiting", "ready")
    class Waiting(_message.Message):
        __slots__ = ("client", "job", "rank", "why")
        CLIENT_FIELD_NUMBER: _ClassVar[int]
        JOB_FIELD_NUMBER: _ClassVar[int]
        RANK_FIELD_NUMBER: _ClassVar[int]
        WHY_FIELD_NUMBER: _ClassVar[int]
        client: str
        job: str
        rank: int
        why: str
        def __init__(self, client: _Optional[str] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    since_unix_seconds: float
    sessions: int
    waiting: _containers.RepeatedCompositeFieldContainer[GetDrainResponse.Waiting]
    ready: bool
    def __init__(self, draining: _Optional[bool] = ..., since_unix_seconds: _Optional[float] = ..., sessions: _Optional[int] = ..., waiting: _Optional[_Iterable[_Union[GetDrainResponse.Waiting, _Mapping]]] = ..., ready: _Optional[bool] = ...) -> None: ...

class KeepStepRequest(_message.Message):
    __slots__ = ("job", "step", "name", "note")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    job: str
    step: int
    name: str
    note: str
    def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., name: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class KeepStepResponse(_message.Message):
    __slots__ = ("kept", "state_dir")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    kept: KeptStep
    state_dir: str
    def __init__(self, kept: _Optional[_Union[KeptStep, _Mapping]] = ..., state_dir: _Optional[str] = ...) -> None: ...

class ForgetStepRequest(_message.Message):
    __slots__ = ("job", "name")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    job: str
    name: str
    def __init__(self, job: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ForgetStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListKeptStepsRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ListKeptStepsResponse(_message.Message):
    __slots__ = ("kept", "state_dir")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedCompositeFieldContainer[KeptStep]
    state_dir: str
    def __init__(self, kept: _Optional[_Iterable[_Union[KeptStep, _Mapping]]] = ..., state_dir: _Optional[str] = ...) -> None: ...

class KeptStep(_message.Message):
    __slots__ = ("name", "note", "step", "layout", "world_size", "kept_at_unix_seconds", "committed_at_unix_seconds", "bytes", "alone_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    KEPT_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ALONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    note: str
    step: int
    layout: str
    world_size: int
    kept_at_unix_seconds: float
    committed_at_unix_seconds: float
    bytes: int
    alone_bytes: int
    def __init__(self, name: _Optional[str] = ..., note: _Optional[str] = ..., step: _Optional[int] = ..., layout: _Optional[str] = ..., world_size: _Optional[int] = ..., kept_at_unix_seconds: _Optional[float] = ..., committed_at_unix_seconds: _Optional[float] = ..., bytes: _Optional[int] = ..., alone_bytes: _Optional[int] = ...) -> None: ...

class GetAccountsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAccountsResponse(_message.Message):
    __slots__ = ("accounts",)
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    accounts: _containers.RepeatedCompositeFieldContainer[TierAccount]
    def __init__(self, accounts: _Optional[_Iterable[_Union[TierAccount, _Mapping]]] = ...) -> None: ...

class TierAccount(_message.Message):
    __slots__ = ("tier", "used_bytes", "holdings", "unexplained_bytes", "settled", "moved_bytes")
    class Holding(_message.Message):
        __slots__ = ("holder", "bytes")
        HOLDER_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        holder: str
        bytes: int
        def __init__(self, holder: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    UNEXPLAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _parameter_store_pb2.Tier
    used_bytes: int
    holdings: _containers.RepeatedCompositeFieldContainer[TierAccount.Holding]
    unexplained_bytes: int
    settled: bool
    moved_bytes: int
    def __init__(self, tier: _Optional[_Union[_parameter_store_pb2.Tier, str]] = ..., used_bytes: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[TierAccount.Holding, _Mapping]]] = ..., unexplained_bytes: _Optional[int] = ..., settled: _Optional[bool] = ..., moved_bytes: _Optional[int] = ...) -> None: ...

class GetTiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTiersResponse(_message.Message):
    __slots__ = ("tiers", "epoch", "state_dir", "sessions", "unix_seconds", "transfer_bytes", "transfer_budget_bytes", "loop_stalls", "longest_loop_stall_seconds")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_DIR_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOP_STALLS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_LOOP_STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierInfo]
    epoch: str
    state_dir: str
    sessions: int
    unix_seconds: float
    transfer_bytes: int
    transfer_budget_bytes: int
    loop_stalls: int
    longest_loop_stall_seconds: float
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierInfo, _Mapping]]] = ..., epoch: _Optional[str] = ..., state_dir: _Optional[str] = ..., sessions: _Optional[int] = ..., unix_seconds: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transfer_budget_bytes: _Optional[int] = ..., loop_stalls: _Optional[int] = ..., longest_loop_stall_seconds: _Optional[float] = ...) -> None: ...

class TierInfo(_message.Message):
    __slots__ = ("tier", "budget_bytes", "used_bytes", "leased_bytes", "evictable_bytes", "hits", "misses", "promotions", "demotions", "queue_depth", "bytes_read", "bytes_written", "read_seconds", "write_seconds", "detail", "problems", "devices", "damaged_blocks", "bad_bytes", "scrubbed_bytes", "scrub_passes", "quarantined_bytes", "gradient_bytes", "lent_bytes", "lend_budget_bytes", "loans", "lenders", "activation_bytes")
    class Loan(_message.Message):
        __slots__ = ("borrower", "token", "peer", "size_bytes", "used_bytes", "bytes_read", "bytes_written", "taken_back_bytes")
        BORROWER_FIELD_NUMBER: _ClassVar[int]
        TOKEN_FIELD_NUMBER: _ClassVar[int]
        PEER_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        USED_BYTES_FIELD_NUMBER: _ClassVar[int]
        BYTES_READ_FIELD_NUMBER: _ClassVar[int]
        BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
        TAKEN_BACK_BYTES_FIELD_NUMBER: _ClassVar[int]
        borrower: str
        token: str
        peer: str
        size_bytes: int
        used_bytes: int
        bytes_read: int
        bytes_written: int
        taken_back_bytes: int
        def __init__(self, borrower: _Optional[str] = ..., token: _Optional[str] = ..., peer: _Optional[str] = ..., size_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., taken_back_bytes: _Optional[int] = ...) -> None: ...
    class Lender(_message.Message):
        __slots__ = ("address", "state", "problem", "size_bytes", "used_bytes", "hits", "misses", "wrong_blocks", "timeouts", "losses", "bytes_per_second", "nvme_bytes_per_second")
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        PROBLEM_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        USED_BYTES_FIELD_NUMBER: _ClassVar[int]
        HITS_FIELD_NUMBER: _ClassVar[int]
        MISSES_FIELD_NUMBER: _ClassVar[int]
        WRONG_BLOCKS_FIELD_NUMBER: _ClassVar[int]
        TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
        LOSSES_FIELD_NUMBER: _ClassVar[int]
        BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
        NVME_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
        address: str
        state: str
        problem: str
        size_bytes: int
        used_bytes: int
        hits: int
        misses: int
        wrong_blocks: int
        timeouts: int
        losses: int
        bytes_per_second: float
        nvme_bytes_per_second: float
        def __init__(self, address: _Optional[str] = ..., state: _Optional[str] = ..., problem: _Optional[str] = ..., size_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., wrong_blocks: _Optional[int] = ..., timeouts: _Optional[int] = ..., losses: _Optional[int] = ..., bytes_per_second: _Optional[float] = ..., nvme_bytes_per_second: _Optional[float] = ...) -> None: ...
    class Device(_message.Message):
        __slots__ = ("path", "direct", "used_bytes", "size_bytes", "free_runs", "bytes_in_flight", "busy_seconds", "stalled_seconds", "bytes_per_second")
        PATH_FIELD_NUMBER: _ClassVar[int]
        DIRECT_FIELD_NUMBER: _ClassVar[int]
        USED_BYTES_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        FREE_RUNS_FIELD_NUMBER: _ClassVar[int]
        BYTES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
        BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
        STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
        BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
        path: str
        direct: bool
        used_bytes: int
        size_bytes: int
        free_runs: int
        bytes_in_flight: int
        busy_seconds: float
        stalled_seconds: float
        bytes_per_second: float
        def __init__(self, path: _Optional[str] = ..., direct: _Optional[bool] = ..., used_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., free_runs: _Optional[int] = ..., bytes_in_flight: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., stalled_seconds: _Optional[float] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    PROMOTIONS_FIELD_NUMBER: _ClassVar[int]
    DEMOTIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUB_PASSES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEND_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOANS_FIELD_NUMBER: _ClassVar[int]
    LENDERS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: _parameter_store_pb2.Tier
    budget_bytes: int
    used_bytes: int
    leased_bytes: int
    evictable_bytes: int
    hits: int
    misses: int
    promotions: int
    demotions: int
    queue_depth: int
    bytes_read: int
    bytes_written: int
    read_seconds: float
    write_seconds: float
    detail: str
    problems: _containers.RepeatedScalarFieldContainer[str]
    devices: _containers.RepeatedCompositeFieldContainer[TierInfo.Device]
    damaged_blocks: int
    bad_bytes: int
    scrubbed_bytes: int
    scrub_passes: int
    quarantined_bytes: int
    gradient_bytes: int
    lent_bytes: int
    lend_budget_bytes: int
    loans: _containers.RepeatedCompositeFieldContainer[TierInfo.Loan]
    lenders: _containers.RepeatedCompositeFieldContainer[TierInfo.Lender]
    activation_bytes: int
    def __init__(self, tier: _Optional[_Union[_parameter_store_pb2.Tier, str]] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., promotions: _Optional[int] = ..., demotions: _Optional[int] = ..., queue_depth: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., read_seconds: _Optional[float] = ..., write_seconds: _Optional[float] = ..., detail: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., devices: _Optional[_Iterable[_Union[TierInfo.Device, _Mapping]]] = ..., damaged_blocks: _Optional[int] = ..., bad_bytes: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., scrub_passes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., gradient_bytes: _Optional[int] = ..., lent_bytes: _Optional[int] = ..., lend_budget_bytes: _Optional[int] = ..., loans: _Optional[_Iterable[_Union[TierInfo.Loan, _Mapping]]] = ..., lenders: _Optional[_Iterable[_Union[TierInfo.Lender, _Mapping]]] = ..., activation_bytes: _Optional[int] = ...) -> None: ...

class WatchTiersRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class ListJobsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobInfo]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobInfo, _Mapping]]] = ...) -> None: ...

class JobInfo(_message.Message):
    __slots__ = ("name", "world_size", "sessions", "parameters", "durability", "committed_step", "durable_step", "bytes", "created_at_unix_seconds", "committed_at_unix_seconds", "kept_steps", "settled_step", "replicas")
    class TierBytes(_message.Message):
        __slots__ = ("tier", "bytes")
        TIER_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        tier: _parameter_store_pb2.Tier
        bytes: int
        def __init__(self, tier: _Optional[_Union[_parameter_store_pb2.Tier, str]] = ..., bytes: _Optional[int] = ...) -> None: ...
    class Replica(_message.Message):
        __slots__ = ("holder", "step", "lag_steps", "lag_seconds", "sent_bytes", "copy_seconds", "problem")
        HOLDER_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        LAG_STEPS_FIELD_NUMBER: _ClassVar[int]
        LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
        SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
        COPY_SECONDS_FIELD_NUMBER: _ClassVar[int]
        PROBLEM_FIELD_NUMBER: _ClassVar[int]
        holder: str
        step: int
        lag_steps: int
        lag_seconds: float
        sent_bytes: int
        copy_seconds: float
        problem: str
        def __init__(self, holder: _Optional[str] = ..., step: _Optional[int] = ..., lag_steps: _Optional[int] = ..., lag_seconds: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., copy_seconds: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    DURABLE_STEP_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_STEP_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    world_size: int
    sessions: int
    parameters: int
    durability: _parameter_store_pb2.Durability
    committed_step: int
    durable_step: int
    bytes: _containers.RepeatedCompositeFieldContainer[JobInfo.TierBytes]
    created_at_unix_seconds: float
    committed_at_unix_seconds: float
    kept_steps: int
    settled_step: int
    replicas: _containers.RepeatedCompositeFieldContainer[JobInfo.Replica]
    def __init__(self, name: _Optional[str] = ..., world_size: _Optional[int] = ..., sessions: _Optional[int] = ..., parameters: _Optional[int] = ..., durability: _Optional[_Union[_parameter_store_pb2.Durability, _Mapping]] = ..., committed_step: _Optional[int] = ..., durable_step: _Optional[int] = ..., bytes: _Optional[_Iterable[_Union[JobInfo.TierBytes, _Mapping]]] = ..., created_at_unix_seconds: _Optional[float] = ..., committed_at_unix_seconds: _Optional[float] = ..., kept_steps: _Optional[int] = ..., settled_step: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[JobInfo.Replica, _Mapping]]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("client", "peer", "job", "rank", "maps_arena", "read_leases", "write_leases", "leased_bytes", "readers", "transfers", "opened_at_unix_seconds", "heard_seconds_ago", "detached", "device_bytes", "device_budget_bytes")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MAPS_ARENA_FIELD_NUMBER: _ClassVar[int]
    READ_LEASES_FIELD_NUMBER: _ClassVar[int]
    WRITE_LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    OPENED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARD_SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    client: str
    peer: str
    job: str
    rank: int
    maps_arena: bool
    read_leases: int
    write_leases: int
    leased_bytes: int
    readers: int
    transfers: int
    opened_at_unix_seconds: float
    heard_seconds_ago: float
    detached: bool
    device_bytes: int
    device_budget_bytes: int
    def __init__(self, client: _Optional[str] = ..., peer: _Optional[str] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., maps_arena: _Optional[bool] = ..., read_leases: _Optional[int] = ..., write_leases: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., readers: _Optional[int] = ..., transfers: _Optional[int] = ..., opened_at_unix_seconds: _Optional[float] = ..., heard_seconds_ago: _Optional[float] = ..., detached: _Optional[bool] = ..., device_bytes: _Optional[int] = ..., device_budget_bytes: _Optional[int] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ("job", "fqn_prefix", "kind", "page_size", "page_token")
    JOB_FIELD_NUMBER: _ClassVar[int]
    FQN_PREFIX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    fqn_prefix: str
    kind: _parameter_store_pb2.Kind
    page_size: int
    page_token: str
    def __init__(self, job: _Optional[str] = ..., fqn_prefix: _Optional[str] = ..., kind: _Optional[_Union[_parameter_store_pb2.Kind, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListShardsResponse(_message.Message):
    __slots__ = ("shards", "next_page_token")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardInfo]
    next_page_token: str
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ShardInfo(_message.Message):
    __slots__ = ("fqn", "kind", "offset", "numel", "dtype", "group", "version", "tiers", "placement")
    FQN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    kind: _parameter_store_pb2.Kind
    offset: int
    numel: int
    dtype: _parameter_store_pb2.DType
    group: str
    version: int
    tiers: _containers.RepeatedScalarFieldContainer[_parameter_store_pb2.Tier]
    placement: _parameter_store_pb2.Tier
    def __init__(self, fqn: _Optional[str] = ..., kind: _Optional[_Union[_parameter_store_pb2.Kind, str]] = ..., offset: _Optional[int] = ..., numel: _Optional[int] = ..., dtype: _Optional[_Union[_parameter_store_pb2.DType, str]] = ..., group: _Optional[str] = ..., version: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[_parameter_store_pb2.Tier, str]]] = ..., placement: _Optional[_Union[_parameter_store_pb2.Tier, str]] = ...) -> None: ...

class DeleteJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class DeleteJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
