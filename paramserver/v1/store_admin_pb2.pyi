from paramserver.v1 import parameter_store_pb2 as _parameter_store_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("tier", "used_bytes", "holdings", "unexplained_bytes", "settled")
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
    tier: _parameter_store_pb2.Tier
    used_bytes: int
    holdings: _containers.RepeatedCompositeFieldContainer[TierAccount.Holding]
    unexplained_bytes: int
    settled: bool
    def __init__(self, tier: _Optional[_Union[_parameter_store_pb2.Tier, str]] = ..., used_bytes: _Optional[int] = ..., holdings: _Optional[_Iterable[_Union[TierAccount.Holding, _Mapping]]] = ..., unexplained_bytes: _Optional[int] = ..., settled: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("tier", "budget_bytes", "used_bytes", "leased_bytes", "evictable_bytes", "hits", "misses", "promotions", "demotions", "queue_depth", "bytes_read", "bytes_written", "read_seconds", "write_seconds", "detail", "problems", "devices", "damaged_blocks", "bad_bytes", "scrubbed_bytes", "scrub_passes", "quarantined_bytes")
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
    def __init__(self, tier: _Optional[_Union[_parameter_store_pb2.Tier, str]] = ..., budget_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., promotions: _Optional[int] = ..., demotions: _Optional[int] = ..., queue_depth: _Optional[int] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., read_seconds: _Optional[float] = ..., write_seconds: _Optional[float] = ..., detail: _Optional[str] = ..., problems: _Optional[_Iterable[str]] = ..., devices: _Optional[_Iterable[_Union[TierInfo.Device, _Mapping]]] = ..., damaged_blocks: _Optional[int] = ..., bad_bytes: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., scrub_passes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("name", "world_size", "sessions", "parameters", "durability", "committed_step", "durable_step", "bytes", "created_at_unix_seconds", "committed_at_unix_seconds", "kept_steps")
    class TierBytes(_message.Message):
        __slots__ = ("tier", "bytes")
        TIER_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        tier: _parameter_store_pb2.Tier
        bytes: int
        def __init__(self, tier: _Optional[_Union[_parameter_store_pb2.Tier, str]] = ..., bytes: _Optional[int] = ...) -> None: ...
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
    def __init__(self, name: _Optional[str] = ..., world_size: _Optional[int] = ..., sessions: _Optional[int] = ..., parameters: _Optional[int] = ..., durability: _Optional[_Union[_parameter_store_pb2.Durability, _Mapping]] = ..., committed_step: _Optional[int] = ..., durable_step: _Optional[int] = ..., bytes: _Optional[_Iterable[_Union[JobInfo.TierBytes, _Mapping]]] = ..., created_at_unix_seconds: _Optional[float] = ..., committed_at_unix_seconds: _Optional[float] = ..., kept_steps: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("client", "peer", "job", "rank", "maps_arena", "read_leases", "write_leases", "leased_bytes", "readers", "transfers", "opened_at_unix_seconds", "heard_seconds_ago", "detached")
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
    def __init__(self, client: _Optional[str] = ..., peer: _Optional[str] = ..., job: _Optional[str] = ..., rank: _Optional[int] = ..., maps_arena: _Optional[bool] = ..., read_leases: _Optional[int] = ..., write_leases: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., readers: _Optional[int] = ..., transfers: _Optional[int] = ..., opened_at_unix_seconds: _Optional[float] = ..., heard_seconds_ago: _Optional[float] = ..., detached: _Optional[bool] = ...) -> None: ...

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
