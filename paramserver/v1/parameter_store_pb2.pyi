from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_PARAM: _ClassVar[Kind]
    KIND_MASTER: _ClassVar[Kind]
    KIND_GRAD: _ClassVar[Kind]
    KIND_EXP_AVG: _ClassVar[Kind]
    KIND_EXP_AVG_SQ: _ClassVar[Kind]
    KIND_MOMENTUM_BUFFER: _ClassVar[Kind]
    KIND_SUM: _ClassVar[Kind]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_GPU: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]
    TIER_REMOTE: _ClassVar[Tier]

class ResumePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESUME_POLICY_UNSPECIFIED: _ClassVar[ResumePolicy]
    RESUME_POLICY_AUTO: _ClassVar[ResumePolicy]
    RESUME_POLICY_NEVER: _ClassVar[ResumePolicy]
    RESUME_POLICY_MUST: _ClassVar[ResumePolicy]

class LeaseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_MODE_UNSPECIFIED: _ClassVar[LeaseMode]
    LEASE_MODE_READ: _ClassVar[LeaseMode]
    LEASE_MODE_WRITE: _ClassVar[LeaseMode]

class Urgency(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    URGENCY_UNSPECIFIED: _ClassVar[Urgency]
    URGENCY_DEMAND: _ClassVar[Urgency]
    URGENCY_PREFETCH: _ClassVar[Urgency]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType
KIND_UNSPECIFIED: Kind
KIND_PARAM: Kind
KIND_MASTER: Kind
KIND_GRAD: Kind
KIND_EXP_AVG: Kind
KIND_EXP_AVG_SQ: Kind
KIND_MOMENTUM_BUFFER: Kind
KIND_SUM: Kind
TIER_UNSPECIFIED: Tier
TIER_GPU: Tier
TIER_HOST: Tier
TIER_NVME: Tier
TIER_REMOTE: Tier
RESUME_POLICY_UNSPECIFIED: ResumePolicy
RESUME_POLICY_AUTO: ResumePolicy
RESUME_POLICY_NEVER: ResumePolicy
RESUME_POLICY_MUST: ResumePolicy
LEASE_MODE_UNSPECIFIED: LeaseMode
LEASE_MODE_READ: LeaseMode
LEASE_MODE_WRITE: LeaseMode
URGENCY_UNSPECIFIED: Urgency
URGENCY_DEMAND: Urgency
URGENCY_PREFETCH: Urgency

class Durability(_message.Message):
    __slots__ = ("step", "snapshot", "none")
    class Step(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Snapshot(_message.Message):
        __slots__ = ("every_steps",)
        EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
        every_steps: int
        def __init__(self, every_steps: _Optional[int] = ...) -> None: ...
    class Volatile(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    NONE_FIELD_NUMBER: _ClassVar[int]
    step: Durability.Step
    snapshot: Durability.Snapshot
    none: Durability.Volatile
    def __init__(self, step: _Optional[_Union[Durability.Step, _Mapping]] = ..., snapshot: _Optional[_Union[Durability.Snapshot, _Mapping]] = ..., none: _Optional[_Union[Durability.Volatile, _Mapping]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "heartbeat")
    class Hello(_message.Message):
        __slots__ = ("client", "session_id", "registers_arena", "capabilities", "stream_number")
        CLIENT_FIELD_NUMBER: _ClassVar[int]
        SESSION_ID_FIELD_NUMBER: _ClassVar[int]
        REGISTERS_ARENA_FIELD_NUMBER: _ClassVar[int]
        CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
        STREAM_NUMBER_FIELD_NUMBER: _ClassVar[int]
        client: str
        session_id: str
        registers_arena: bool
        capabilities: _containers.RepeatedScalarFieldContainer[str]
        stream_number: int
        def __init__(self, client: _Optional[str] = ..., session_id: _Optional[str] = ..., registers_arena: _Optional[bool] = ..., capabilities: _Optional[_Iterable[str]] = ..., stream_number: _Optional[int] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: SessionRequest.Hello
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[SessionRequest.Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "heartbeat", "notice")
    class Event(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EVENT_UNSPECIFIED: _ClassVar[SessionResponse.Event]
        EVENT_SHUTDOWN: _ClassVar[SessionResponse.Event]
        EVENT_TIER_DEGRADED: _ClassVar[SessionResponse.Event]
        EVENT_TIER_RECOVERED: _ClassVar[SessionResponse.Event]
        EVENT_BUDGET_PRESSURE: _ClassVar[SessionResponse.Event]
        EVENT_BUDGET_RELIEVED: _ClassVar[SessionResponse.Event]
        EVENT_RANK_GONE: _ClassVar[SessionResponse.Event]
        EVENT_RANK_CLOSED: _ClassVar[SessionResponse.Event]
    EVENT_UNSPECIFIED: SessionResponse.Event
    EVENT_SHUTDOWN: SessionResponse.Event
    EVENT_TIER_DEGRADED: SessionResponse.Event
    EVENT_TIER_RECOVERED: SessionResponse.Event
    EVENT_BUDGET_PRESSURE: SessionResponse.Event
    EVENT_BUDGET_RELIEVED: SessionResponse.Event
    EVENT_RANK_GONE: SessionResponse.Event
    EVENT_RANK_CLOSED: SessionResponse.Event
    class Welcome(_message.Message):
        __slots__ = ("session_id", "epoch", "heartbeat_interval_millis", "heartbeat_timeout_millis", "arena", "version", "grace_millis", "patience_millis", "capabilities")
        SESSION_ID_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        HEARTBEAT_INTERVAL_MILLIS_FIELD_NUMBER: _ClassVar[int]
        HEARTBEAT_TIMEOUT_MILLIS_FIELD_NUMBER: _ClassVar[int]
        ARENA_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        GRACE_MILLIS_FIELD_NUMBER: _ClassVar[int]
        PATIENCE_MILLIS_FIELD_NUMBER: _ClassVar[int]
        CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
        session_id: str
        epoch: str
        heartbeat_interval_millis: int
        heartbeat_timeout_millis: int
        arena: Arena
        version: str
        grace_millis: int
        patience_millis: int
        capabilities: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[str] = ..., heartbeat_interval_millis: _Optional[int] = ..., heartbeat_timeout_millis: _Optional[int] = ..., arena: _Optional[_Union[Arena, _Mapping]] = ..., version: _Optional[str] = ..., grace_millis: _Optional[int] = ..., patience_millis: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ...) -> None: ...
    class Notice(_message.Message):
        __slots__ = ("text", "event", "tier")
        TEXT_FIELD_NUMBER: _ClassVar[int]
        EVENT_FIELD_NUMBER: _ClassVar[int]
        TIER_FIELD_NUMBER: _ClassVar[int]
        text: str
        event: SessionResponse.Event
        tier: Tier
        def __init__(self, text: _Optional[str] = ..., event: _Optional[_Union[SessionResponse.Event, str]] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionResponse.Welcome
    heartbeat: Heartbeat
    notice: SessionResponse.Notice
    def __init__(self, welcome: _Optional[_Union[SessionResponse.Welcome, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., notice: _Optional[_Union[SessionResponse.Notice, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Arena(_message.Message):
    __slots__ = ("socket_path", "nonce", "size_bytes", "file_path", "generation_offset", "generation", "settled_offset", "piece_bytes")
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_PATH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_OFFSET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SETTLED_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    socket_path: str
    nonce: bytes
    size_bytes: int
    file_path: str
    generation_offset: int
    generation: int
    settled_offset: int
    piece_bytes: int
    def __init__(self, socket_path: _Optional[str] = ..., nonce: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., file_path: _Optional[str] = ..., generation_offset: _Optional[int] = ..., generation: _Optional[int] = ..., settled_offset: _Optional[int] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ("fqn", "shape", "dtype", "trainable")
    FQN_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: DType
    trainable: bool
    def __init__(self, fqn: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[DType, str]] = ..., trainable: _Optional[bool] = ...) -> None: ...

class OpenJobRequest(_message.Message):
    __slots__ = ("session_id", "job", "run_id", "rank", "world_size", "attached_ranks", "parameters", "durability", "resume", "layout", "comes_back")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_RANKS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    COMES_BACK_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    job: str
    run_id: str
    rank: int
    world_size: int
    attached_ranks: int
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    durability: Durability
    resume: ResumePolicy
    layout: str
    comes_back: bool
    def __init__(self, session_id: _Optional[str] = ..., job: _Optional[str] = ..., run_id: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., attached_ranks: _Optional[int] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., durability: _Optional[_Union[Durability, _Mapping]] = ..., resume: _Optional[_Union[ResumePolicy, str]] = ..., layout: _Optional[str] = ..., comes_back: _Optional[bool] = ...) -> None: ...

class OpenJobResponse(_message.Message):
    __slots__ = ("committed", "layouts")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    committed: _containers.RepeatedCompositeFieldContainer[CommittedStep]
    layouts: _containers.RepeatedCompositeFieldContainer[StoredLayout]
    def __init__(self, committed: _Optional[_Iterable[_Union[CommittedStep, _Mapping]]] = ..., layouts: _Optional[_Iterable[_Union[StoredLayout, _Mapping]]] = ...) -> None: ...

class StoredLayout(_message.Message):
    __slots__ = ("layout", "world_size", "steps", "rolled_back")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    layout: str
    world_size: int
    steps: _containers.RepeatedScalarFieldContainer[int]
    rolled_back: _containers.RepeatedCompositeFieldContainer[RolledBack]
    def __init__(self, layout: _Optional[str] = ..., world_size: _Optional[int] = ..., steps: _Optional[_Iterable[int]] = ..., rolled_back: _Optional[_Iterable[_Union[RolledBack, _Mapping]]] = ...) -> None: ...

class RolledBack(_message.Message):
    __slots__ = ("step", "name")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    step: int
    name: str
    def __init__(self, step: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class BeginLayoutRequest(_message.Message):
    __slots__ = ("session_id", "first_step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    first_step: int
    def __init__(self, session_id: _Optional[str] = ..., first_step: _Optional[int] = ...) -> None: ...

class BeginLayoutResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommittedStep(_message.Message):
    __slots__ = ("step", "client_state")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_STATE_FIELD_NUMBER: _ClassVar[int]
    step: int
    client_state: bytes
    def __init__(self, step: _Optional[int] = ..., client_state: _Optional[bytes] = ...) -> None: ...

class OpenReaderRequest(_message.Message):
    __slots__ = ("session_id", "job", "step", "layout", "kept", "unsettled")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    job: str
    step: int
    layout: str
    kept: str
    unsettled: bool
    def __init__(self, session_id: _Optional[str] = ..., job: _Optional[str] = ..., step: _Optional[int] = ..., layout: _Optional[str] = ..., kept: _Optional[str] = ..., unsettled: _Optional[bool] = ...) -> None: ...

class OpenReaderResponse(_message.Message):
    __slots__ = ("reader_id", "step", "ranks")
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    reader_id: int
    step: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reader_id: _Optional[int] = ..., step: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadClientStateRequest(_message.Message):
    __slots__ = ("session_id", "reader_id", "rank")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reader_id: int
    rank: int
    def __init__(self, session_id: _Optional[str] = ..., reader_id: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class ReadClientStateResponse(_message.Message):
    __slots__ = ("client_state",)
    CLIENT_STATE_FIELD_NUMBER: _ClassVar[int]
    client_state: bytes
    def __init__(self, client_state: _Optional[bytes] = ...) -> None: ...

class DescribeStepRequest(_message.Message):
    __slots__ = ("session_id", "reader_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reader_id: int
    def __init__(self, session_id: _Optional[str] = ..., reader_id: _Optional[int] = ...) -> None: ...

class DescribeStepResponse(_message.Message):
    __slots__ = ("step", "parameters", "groups")
    class StepOfJob(_message.Message):
        __slots__ = ("job", "step", "layout", "world_size", "durability", "committed_at_unix_seconds", "ranks")
        JOB_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        LAYOUT_FIELD_NUMBER: _ClassVar[int]
        WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
        DURABILITY_FIELD_NUMBER: _ClassVar[int]
        COMMITTED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
        RANKS_FIELD_NUMBER: _ClassVar[int]
        job: str
        step: int
        layout: str
        world_size: int
        durability: Durability
        committed_at_unix_seconds: float
        ranks: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, job: _Optional[str] = ..., step: _Optional[int] = ..., layout: _Optional[str] = ..., world_size: _Optional[int] = ..., durability: _Optional[_Union[Durability, _Mapping]] = ..., committed_at_unix_seconds: _Optional[float] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...
    class StoredGroup(_message.Message):
        __slots__ = ("group", "versions")
        GROUP_FIELD_NUMBER: _ClassVar[int]
        VERSIONS_FIELD_NUMBER: _ClassVar[int]
        group: ShardGroup
        versions: _containers.RepeatedCompositeFieldContainer[DescribeStepResponse.SlabVersion]
        def __init__(self, group: _Optional[_Union[ShardGroup, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[DescribeStepResponse.SlabVersion, _Mapping]]] = ...) -> None: ...
    class SlabVersion(_message.Message):
        __slots__ = ("kind", "version")
        KIND_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        kind: Kind
        version: int
        def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., version: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    step: DescribeStepResponse.StepOfJob
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    groups: _containers.RepeatedCompositeFieldContainer[DescribeStepResponse.StoredGroup]
    def __init__(self, step: _Optional[_Union[DescribeStepResponse.StepOfJob, _Mapping]] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[DescribeStepResponse.StoredGroup, _Mapping]]] = ...) -> None: ...

class DigestSlabsRequest(_message.Message):
    __slots__ = ("session_id", "reader_id", "slabs")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reader_id: int
    slabs: _containers.RepeatedCompositeFieldContainer[SlabName]
    def __init__(self, session_id: _Optional[str] = ..., reader_id: _Optional[int] = ..., slabs: _Optional[_Iterable[_Union[SlabName, _Mapping]]] = ...) -> None: ...

class DigestSlabsResponse(_message.Message):
    __slots__ = ("slabs",)
    class SlabDigest(_message.Message):
        __slots__ = ("digest", "version")
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        VERSION_FIELD_NUMBER: _ClassVar[int]
        digest: bytes
        version: int
        def __init__(self, digest: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...
    SLABS_FIELD_NUMBER: _ClassVar[int]
    slabs: _containers.RepeatedCompositeFieldContainer[DigestSlabsResponse.SlabDigest]
    def __init__(self, slabs: _Optional[_Iterable[_Union[DigestSlabsResponse.SlabDigest, _Mapping]]] = ...) -> None: ...

class CloseReaderRequest(_message.Message):
    __slots__ = ("session_id", "reader_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    reader_id: int
    def __init__(self, session_id: _Optional[str] = ..., reader_id: _Optional[int] = ...) -> None: ...

class CloseReaderResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Shard(_message.Message):
    __slots__ = ("fqn", "offset", "numel", "position")
    FQN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    offset: int
    numel: int
    position: int
    def __init__(self, fqn: _Optional[str] = ..., offset: _Optional[int] = ..., numel: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class ShardGroup(_message.Message):
    __slots__ = ("name", "numel", "shards", "kinds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    numel: int
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    kinds: _containers.RepeatedCompositeFieldContainer[KindSpec]
    def __init__(self, name: _Optional[str] = ..., numel: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., kinds: _Optional[_Iterable[_Union[KindSpec, _Mapping]]] = ...) -> None: ...

class KindSpec(_message.Message):
    __slots__ = ("kind", "dtype", "placement", "codec")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    dtype: DType
    placement: Tier
    codec: str
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., dtype: _Optional[_Union[DType, str]] = ..., placement: _Optional[_Union[Tier, str]] = ..., codec: _Optional[str] = ...) -> None: ...

class RegisterShardsRequest(_message.Message):
    __slots__ = ("session_id", "groups")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    groups: _containers.RepeatedCompositeFieldContainer[ShardGroup]
    def __init__(self, session_id: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[ShardGroup, _Mapping]]] = ...) -> None: ...

class RegisterShardsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlabName(_message.Message):
    __slots__ = ("group", "kind")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    group: str
    kind: Kind
    def __init__(self, group: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session_id", "wants")
    class Want(_message.Message):
        __slots__ = ("slab", "position")
        SLAB_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        slab: SlabName
        position: int
        def __init__(self, slab: _Optional[_Union[SlabName, _Mapping]] = ..., position: _Optional[int] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    wants: _containers.RepeatedCompositeFieldContainer[PrefetchRequest.Want]
    def __init__(self, session_id: _Optional[str] = ..., wants: _Optional[_Iterable[_Union[PrefetchRequest.Want, _Mapping]]] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("fetched_bytes", "fetch_seconds")
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fetched_bytes: int
    fetch_seconds: float
    def __init__(self, fetched_bytes: _Optional[int] = ..., fetch_seconds: _Optional[float] = ...) -> None: ...

class AcquireLeasesRequest(_message.Message):
    __slots__ = ("session_id", "wants")
    class Want(_message.Message):
        __slots__ = ("slab", "mode", "position", "step", "range", "as_of_step", "ranges", "device", "activation")
        SLAB_FIELD_NUMBER: _ClassVar[int]
        MODE_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        RANGE_FIELD_NUMBER: _ClassVar[int]
        AS_OF_STEP_FIELD_NUMBER: _ClassVar[int]
        RANGES_FIELD_NUMBER: _ClassVar[int]
        DEVICE_FIELD_NUMBER: _ClassVar[int]
        ACTIVATION_FIELD_NUMBER: _ClassVar[int]
        slab: SlabName
        mode: LeaseMode
        position: int
        step: int
        range: TensorRange
        as_of_step: int
        ranges: _containers.RepeatedCompositeFieldContainer[TensorRange]
        device: DeviceUse
        activation: ActivationUse
        def __init__(self, slab: _Optional[_Union[SlabName, _Mapping]] = ..., mode: _Optional[_Union[LeaseMode, str]] = ..., position: _Optional[int] = ..., step: _Optional[int] = ..., range: _Optional[_Union[TensorRange, _Mapping]] = ..., as_of_step: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[TensorRange, _Mapping]]] = ..., device: _Optional[_Union[DeviceUse, _Mapping]] = ..., activation: _Optional[_Union[ActivationUse, _Mapping]] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    wants: _containers.RepeatedCompositeFieldContainer[AcquireLeasesRequest.Want]
    def __init__(self, session_id: _Optional[str] = ..., wants: _Optional[_Iterable[_Union[AcquireLeasesRequest.Want, _Mapping]]] = ...) -> None: ...

class ActivationUse(_message.Message):
    __slots__ = ("size_bytes", "lease_id")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    lease_id: int
    def __init__(self, size_bytes: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class DeviceUse(_message.Message):
    __slots__ = ("next_use",)
    NEXT_USE_FIELD_NUMBER: _ClassVar[int]
    next_use: int
    def __init__(self, next_use: _Optional[int] = ...) -> None: ...

class DeviceRange(_message.Message):
    __slots__ = ("offset", "generation")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    offset: int
    generation: int
    def __init__(self, offset: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class AcquireLeasesResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "version", "arena_offset", "size_bytes", "generation", "update_wait_seconds", "device", "keep", "park")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ARENA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UPDATE_WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    PARK_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    version: int
    arena_offset: int
    size_bytes: int
    generation: int
    update_wait_seconds: float
    device: DeviceRange
    keep: DeviceRange
    park: bool
    def __init__(self, lease_id: _Optional[int] = ..., version: _Optional[int] = ..., arena_offset: _Optional[int] = ..., size_bytes: _Optional[int] = ..., generation: _Optional[int] = ..., update_wait_seconds: _Optional[float] = ..., device: _Optional[_Union[DeviceRange, _Mapping]] = ..., keep: _Optional[_Union[DeviceRange, _Mapping]] = ..., park: _Optional[bool] = ...) -> None: ...

class OfferDeviceMemoryRequest(_message.Message):
    __slots__ = ("session_id", "size_bytes", "device")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    size_bytes: int
    device: str
    def __init__(self, session_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class OfferDeviceMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("session_id", "releases")
    class Release(_message.Message):
        __slots__ = ("lease_id", "publish", "next_use", "kept")
        LEASE_ID_FIELD_NUMBER: _ClassVar[int]
        PUBLISH_FIELD_NUMBER: _ClassVar[int]
        NEXT_USE_FIELD_NUMBER: _ClassVar[int]
        KEPT_FIELD_NUMBER: _ClassVar[int]
        lease_id: int
        publish: bool
        next_use: int
        kept: bool
        def __init__(self, lease_id: _Optional[int] = ..., publish: _Optional[bool] = ..., next_use: _Optional[int] = ..., kept: _Optional[bool] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    releases: _containers.RepeatedCompositeFieldContainer[ReleaseLeasesRequest.Release]
    def __init__(self, session_id: _Optional[str] = ..., releases: _Optional[_Iterable[_Union[ReleaseLeasesRequest.Release, _Mapping]]] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("open", "credit")
    class Open(_message.Message):
        __slots__ = ("session_id", "lease_id", "range", "first_byte", "credit_bytes", "urgency")
        SESSION_ID_FIELD_NUMBER: _ClassVar[int]
        LEASE_ID_FIELD_NUMBER: _ClassVar[int]
        RANGE_FIELD_NUMBER: _ClassVar[int]
        FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
        CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
        URGENCY_FIELD_NUMBER: _ClassVar[int]
        session_id: str
        lease_id: int
        range: TensorRange
        first_byte: int
        credit_bytes: int
        urgency: Urgency
        def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., range: _Optional[_Union[TensorRange, _Mapping]] = ..., first_byte: _Optional[int] = ..., credit_bytes: _Optional[int] = ..., urgency: _Optional[_Union[Urgency, str]] = ...) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    open: ReadRequest.Open
    credit: Credit
    def __init__(self, open: _Optional[_Union[ReadRequest.Open, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class TensorRange(_message.Message):
    __slots__ = ("fqn", "kind", "offset", "numel", "reader_id")
    FQN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUMEL_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    fqn: str
    kind: Kind
    offset: int
    numel: int
    reader_id: int
    def __init__(self, fqn: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., offset: _Optional[int] = ..., numel: _Optional[int] = ..., reader_id: _Optional[int] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ReadHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[ReadHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class ReadHeader(_message.Message):
    __slots__ = ("size_bytes", "version", "dtype")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    version: int
    dtype: DType
    def __init__(self, size_bytes: _Optional[int] = ..., version: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("checksum", "first_byte", "data")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    checksum: int
    first_byte: int
    data: bytes
    def __init__(self, checksum: _Optional[int] = ..., first_byte: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: WriteHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[WriteHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class WriteHeader(_message.Message):
    __slots__ = ("session_id", "lease_id", "first_byte", "size_bytes", "urgency")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: int
    first_byte: int
    size_bytes: int
    urgency: Urgency
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., first_byte: _Optional[int] = ..., size_bytes: _Optional[int] = ..., urgency: _Optional[_Union[Urgency, str]] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("received_bytes", "credit_bytes")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    credit_bytes: int
    def __init__(self, received_bytes: _Optional[int] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class AdamW(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "weight_decay", "update_count")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    update_count: int
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., update_count: _Optional[int] = ...) -> None: ...

class Adam(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "eps", "weight_decay", "update_count")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    UPDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    update_count: int
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., update_count: _Optional[int] = ...) -> None: ...

class Sgd(_message.Message):
    __slots__ = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "update_count")
    LR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    DAMPENING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    NESTEROV_FIELD_NUMBER: _ClassVar[int]
    UPDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    update_count: int
    def __init__(self, lr: _Optional[float] = ..., momentum: _Optional[float] = ..., dampening: _Optional[float] = ..., weight_decay: _Optional[float] = ..., nesterov: _Optional[bool] = ..., update_count: _Optional[int] = ...) -> None: ...

class Lion(_message.Message):
    __slots__ = ("lr", "beta1", "beta2", "weight_decay")
    LR_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    def __init__(self, lr: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...

class Adagrad(_message.Message):
    __slots__ = ("lr", "lr_decay", "weight_decay", "eps", "initial_accumulator_value", "update_count")
    LR_FIELD_NUMBER: _ClassVar[int]
    LR_DECAY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    INITIAL_ACCUMULATOR_VALUE_FIELD_NUMBER: _ClassVar[int]
    UPDATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    lr: float
    lr_decay: float
    weight_decay: float
    eps: float
    initial_accumulator_value: float
    update_count: int
    def __init__(self, lr: _Optional[float] = ..., lr_decay: _Optional[float] = ..., weight_decay: _Optional[float] = ..., eps: _Optional[float] = ..., initial_accumulator_value: _Optional[float] = ..., update_count: _Optional[int] = ...) -> None: ...

class ApplyGradientsRequest(_message.Message):
    __slots__ = ("session_id", "step", "hyper_parameters", "updates", "provisional", "final")
    class HyperParameters(_message.Message):
        __slots__ = ("adamw", "adam", "sgd", "lion", "adagrad")
        ADAMW_FIELD_NUMBER: _ClassVar[int]
        ADAM_FIELD_NUMBER: _ClassVar[int]
        SGD_FIELD_NUMBER: _ClassVar[int]
        LION_FIELD_NUMBER: _ClassVar[int]
        ADAGRAD_FIELD_NUMBER: _ClassVar[int]
        adamw: AdamW
        adam: Adam
        sgd: Sgd
        lion: Lion
        adagrad: Adagrad
        def __init__(self, adamw: _Optional[_Union[AdamW, _Mapping]] = ..., adam: _Optional[_Union[Adam, _Mapping]] = ..., sgd: _Optional[_Union[Sgd, _Mapping]] = ..., lion: _Optional[_Union[Lion, _Mapping]] = ..., adagrad: _Optional[_Union[Adagrad, _Mapping]] = ...) -> None: ...
    class GroupUpdate(_message.Message):
        __slots__ = ("group", "grad_lease_id", "grad_scale", "hyper_parameters_of_shard", "grad_clip_value", "position")
        GROUP_FIELD_NUMBER: _ClassVar[int]
        GRAD_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
        GRAD_SCALE_FIELD_NUMBER: _ClassVar[int]
        HYPER_PARAMETERS_OF_SHARD_FIELD_NUMBER: _ClassVar[int]
        GRAD_CLIP_VALUE_FIELD_NUMBER: _ClassVar[int]
        POSITION_FIELD_NUMBER: _ClassVar[int]
        group: str
        grad_lease_id: int
        grad_scale: float
        hyper_parameters_of_shard: _containers.RepeatedScalarFieldContainer[int]
        grad_clip_value: float
        position: int
        def __init__(self, group: _Optional[str] = ..., grad_lease_id: _Optional[int] = ..., grad_scale: _Optional[float] = ..., hyper_parameters_of_shard: _Optional[_Iterable[int]] = ..., grad_clip_value: _Optional[float] = ..., position: _Optional[int] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HYPER_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    hyper_parameters: _containers.RepeatedCompositeFieldContainer[ApplyGradientsRequest.HyperParameters]
    updates: _containers.RepeatedCompositeFieldContainer[ApplyGradientsRequest.GroupUpdate]
    provisional: bool
    final: bool
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., hyper_parameters: _Optional[_Iterable[_Union[ApplyGradientsRequest.HyperParameters, _Mapping]]] = ..., updates: _Optional[_Iterable[_Union[ApplyGradientsRequest.GroupUpdate, _Mapping]]] = ..., provisional: _Optional[bool] = ..., final: _Optional[bool] = ...) -> None: ...

class ApplyGradientsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WithdrawUpdatesRequest(_message.Message):
    __slots__ = ("session_id", "step", "groups")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class WithdrawUpdatesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ParkGradientsRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ParkGradientsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitStepRequest(_message.Message):
    __slots__ = ("session_id", "step", "client_state", "settled_step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_STATE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    client_state: bytes
    settled_step: int
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., client_state: _Optional[bytes] = ..., settled_step: _Optional[int] = ...) -> None: ...

class CommitStepResponse(_message.Message):
    __slots__ = ("durable",)
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    durable: bool
    def __init__(self, durable: _Optional[bool] = ...) -> None: ...

class AmendStepRequest(_message.Message):
    __slots__ = ("session_id", "step", "client_state")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLIENT_STATE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    client_state: bytes
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., client_state: _Optional[bytes] = ...) -> None: ...

class AmendStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SettleStepRequest(_message.Message):
    __slots__ = ("session_id", "step", "record")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    record: bool
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ..., record: _Optional[bool] = ...) -> None: ...

class SettleStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollBackRequest(_message.Message):
    __slots__ = ("session_id", "step")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step: int
    def __init__(self, session_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RollBackResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[VersionInfo]
    def __init__(self, versions: _Optional[_Iterable[_Union[VersionInfo, _Mapping]]] = ...) -> None: ...

class VersionInfo(_message.Message):
    __slots__ = ("step", "durable", "committed_at_unix_seconds")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    durable: bool
    committed_at_unix_seconds: float
    def __init__(self, step: _Optional[int] = ..., durable: _Optional[bool] = ..., committed_at_unix_seconds: _Optional[float] = ...) -> None: ...

class ListStoredJobsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ListStoredJobsResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[StoredJob]
    def __init__(self, jobs: _Optional[_Iterable[_Union[StoredJob, _Mapping]]] = ...) -> None: ...

class StoredJob(_message.Message):
    __slots__ = ("name", "world_size", "committed_step", "durable", "layouts", "unsettled", "settled")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    name: str
    world_size: int
    committed_step: int
    durable: bool
    layouts: _containers.RepeatedCompositeFieldContainer[StoredLayout]
    unsettled: bool
    settled: VersionInfo
    def __init__(self, name: _Optional[str] = ..., world_size: _Optional[int] = ..., committed_step: _Optional[int] = ..., durable: _Optional[bool] = ..., layouts: _Optional[_Iterable[_Union[StoredLayout, _Mapping]]] = ..., unsettled: _Optional[bool] = ..., settled: _Optional[_Union[VersionInfo, _Mapping]] = ...) -> None: ...

class ListStoredTensorsRequest(_message.Message):
    __slots__ = ("session_id", "job", "fqn_prefix", "page_size", "page_token", "layout", "kept")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    FQN_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    job: str
    fqn_prefix: str
    page_size: int
    page_token: str
    layout: str
    kept: str
    def __init__(self, session_id: _Optional[str] = ..., job: _Optional[str] = ..., fqn_prefix: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., layout: _Optional[str] = ..., kept: _Optional[str] = ...) -> None: ...

class ListStoredTensorsResponse(_message.Message):
    __slots__ = ("tensors", "next_page_token")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[StoredTensor]
    next_page_token: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[StoredTensor, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class StoredTensor(_message.Message):
    __slots__ = ("parameter", "kinds", "held", "index")
    class KindDType(_message.Message):
        __slots__ = ("kind", "dtype")
        KIND_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        kind: Kind
        dtype: DType
        def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., dtype: _Optional[_Union[DType, str]] = ...) -> None: ...
    class ElementRange(_message.Message):
        __slots__ = ("offset", "numel")
        OFFSET_FIELD_NUMBER: _ClassVar[int]
        NUMEL_FIELD_NUMBER: _ClassVar[int]
        offset: int
        numel: int
        def __init__(self, offset: _Optional[int] = ..., numel: _Optional[int] = ...) -> None: ...
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    parameter: Parameter
    kinds: _containers.RepeatedCompositeFieldContainer[StoredTensor.KindDType]
    held: _containers.RepeatedCompositeFieldContainer[StoredTensor.ElementRange]
    index: int
    def __init__(self, parameter: _Optional[_Union[Parameter, _Mapping]] = ..., kinds: _Optional[_Iterable[_Union[StoredTensor.KindDType, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[StoredTensor.ElementRange, _Mapping]]] = ..., index: _Optional[int] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("session_id", "job", "unsettled")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    job: str
    unsettled: bool
    def __init__(self, session_id: _Optional[str] = ..., job: _Optional[str] = ..., unsettled: _Optional[bool] = ...) -> None: ...

class WatchJobResponse(_message.Message):
    __slots__ = ("newest",)
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    newest: VersionInfo
    def __init__(self, newest: _Optional[_Union[VersionInfo, _Mapping]] = ...) -> None: ...

class ReadCountersRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class ReadCountersResponse(_message.Message):
    __slots__ = ("tiers", "monotonic_seconds", "spilled_activation_bytes")
    class TierCounters(_message.Message):
        __slots__ = ("tier", "bytes_read", "bytes_written", "read_seconds", "write_seconds", "fetch_seconds", "bytes_per_second")
        TIER_FIELD_NUMBER: _ClassVar[int]
        BYTES_READ_FIELD_NUMBER: _ClassVar[int]
        BYTES_WRITTEN_FIELD_NUMBER: _ClassVar[int]
        READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
        WRITE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
        BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
        tier: Tier
        bytes_read: int
        bytes_written: int
        read_seconds: float
        write_seconds: float
        fetch_seconds: float
        bytes_per_second: float
        def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., bytes_read: _Optional[int] = ..., bytes_written: _Optional[int] = ..., read_seconds: _Optional[float] = ..., write_seconds: _Optional[float] = ..., fetch_seconds: _Optional[float] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPILLED_ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[ReadCountersResponse.TierCounters]
    monotonic_seconds: float
    spilled_activation_bytes: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[ReadCountersResponse.TierCounters, _Mapping]]] = ..., monotonic_seconds: _Optional[float] = ..., spilled_activation_bytes: _Optional[int] = ...) -> None: ...

class CollectSpansRequest(_message.Message):
    __slots__ = ("session_id", "ends")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ends: bool
    def __init__(self, session_id: _Optional[str] = ..., ends: _Optional[bool] = ...) -> None: ...

class CollectSpansResponse(_message.Message):
    __slots__ = ("spans", "dropped", "monotonic_seconds")
    class Span(_message.Message):
        __slots__ = ("activity", "subject", "began_seconds", "ended_seconds", "size_bytes")
        ACTIVITY_FIELD_NUMBER: _ClassVar[int]
        SUBJECT_FIELD_NUMBER: _ClassVar[int]
        BEGAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
        ENDED_SECONDS_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        activity: str
        subject: str
        began_seconds: float
        ended_seconds: float
        size_bytes: int
        def __init__(self, activity: _Optional[str] = ..., subject: _Optional[str] = ..., began_seconds: _Optional[float] = ..., ended_seconds: _Optional[float] = ..., size_bytes: _Optional[int] = ...) -> None: ...
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_SECONDS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[CollectSpansResponse.Span]
    dropped: int
    monotonic_seconds: float
    def __init__(self, spans: _Optional[_Iterable[_Union[CollectSpansResponse.Span, _Mapping]]] = ..., dropped: _Optional[int] = ..., monotonic_seconds: _Optional[float] = ...) -> None: ...

class BorrowMemoryRequest(_message.Message):
    __slots__ = ("borrower", "size_bytes")
    BORROWER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    borrower: str
    size_bytes: int
    def __init__(self, borrower: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class BorrowMemoryResponse(_message.Message):
    __slots__ = ("loan_id", "size_bytes")
    LOAN_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    loan_id: str
    size_bytes: int
    def __init__(self, loan_id: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class AccessLoanRequest(_message.Message):
    __slots__ = ("open", "chunk", "read", "discard")
    class Open(_message.Message):
        __slots__ = ("loan_id",)
        LOAN_ID_FIELD_NUMBER: _ClassVar[int]
        loan_id: str
        def __init__(self, loan_id: _Optional[str] = ...) -> None: ...
    class Span(_message.Message):
        __slots__ = ("first_byte", "size_bytes")
        FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        first_byte: int
        size_bytes: int
        def __init__(self, first_byte: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    open: AccessLoanRequest.Open
    chunk: Chunk
    read: AccessLoanRequest.Span
    discard: AccessLoanRequest.Span
    def __init__(self, open: _Optional[_Union[AccessLoanRequest.Open, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., read: _Optional[_Union[AccessLoanRequest.Span, _Mapping]] = ..., discard: _Optional[_Union[AccessLoanRequest.Span, _Mapping]] = ...) -> None: ...

class AccessLoanResponse(_message.Message):
    __slots__ = ("kept", "chunk", "gone")
    class Kept(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class Gone(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    KEPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    kept: AccessLoanResponse.Kept
    chunk: Chunk
    gone: AccessLoanResponse.Gone
    def __init__(self, kept: _Optional[_Union[AccessLoanResponse.Kept, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., gone: _Optional[_Union[AccessLoanResponse.Gone, _Mapping]] = ...) -> None: ...
