"""The conversion between the wire's messages and the storage engine's types.

This module owns the checks of the values that clients send, and the limits of requests. It must use a name from a
client only as data: no name becomes a path or a part of a path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from paramserver.contract.limits import MAX_CLIENT_STATE_BYTES
from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.contract.optimizers.registry import find_problem, state_kinds
from paramserver.optimizer_kernel import OptimizerUpdate
from paramserver.rpc.urgency import Urgency
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import DTYPE_FROM_WIRE, DTYPE_TO_WIRE, KIND_FROM_WIRE, TIER_FROM_WIRE
from storage.base.codec import PLAIN
from storage.base.errors import InvalidRequestError
from storage.base.shard import (
    OPTIMIZER_STATES,
    DType,
    Durability,
    GroupSpec,
    JobSpec,
    Kind,
    ParameterSpec,
    Shard,
    SlabSpec,
)
from storage.memory.gathering import TensorRange

MAX_NAME_BYTES = 1024
# The most elements of a tensor. No tensor is that large, and with more elements the byte offsets that the engine
# computes could overflow 64 bits.
MAX_ELEMENTS = 1 << 48
# The most dimensions of a tensor that a client may declare, which is torch's own limit.
MAX_DIMENSIONS = 64
# The largest number of a step or a position. Both are also kept as floating-point numbers, by the prefetch queue and in
# JSON, and above this limit two different integers would be the same floating-point number.
MAX_STEP = (1 << 53) - 1
# The most parameters of one job. The largest models have some ten thousand parameters, mixtures of experts with a
# parameter per expert ten times as many, and stores of small tensors twice as many again.
MAX_PARAMETERS = 1 << 18
# The most groups and the most shards of one rank. A rank that trains has at most one shard of each parameter; padding
# is not a shard.
MAX_GROUPS = 1 << 16
MAX_SHARDS = 1 << 18
# The most leases, prefetch wants, releases or updates in one request. A trainer sends requests for one unit or a few
# units, and even the entries for all units of a large model are fewer.
MAX_BATCH = 1 << 14

_URGENCIES = {
    pb.URGENCY_UNSPECIFIED: Urgency.DEMAND,
    pb.URGENCY_DEMAND: Urgency.DEMAND,
    pb.URGENCY_PREFETCH: Urgency.PREFETCH,
}

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
ItemT = TypeVar("ItemT")


def kind(value: pb.Kind) -> Kind:
    """Return the engine's kind. Raise InvalidRequestError for a value that is no kind."""
    return _lookup(KIND_FROM_WIRE, value, "kind")


def urgency(value: pb.Urgency) -> Urgency:
    """Return the urgency of a transfer. Raise InvalidRequestError for a value that is no urgency."""
    return _lookup(_URGENCIES, value, "urgency")


def name(value: str, field: str) -> str:
    """Return a name that can be part of a message or a log line: not empty, not too long, and printable.

    Raises:
        InvalidRequestError: the name is empty, too long or not printable.
    """
    if not value or len(value.encode()) > MAX_NAME_BYTES or not value.isprintable():
        raise InvalidRequestError(
            f"{field} must be 1 to {MAX_NAME_BYTES} bytes of printable text; it is {value[:80]!r}"
        )
    return value


def step(value: int, field: str) -> int:
    """Return a step's number. Raise InvalidRequestError for a number that no step can have."""
    return _at_most(value, MAX_STEP, field)


def device_bytes(value: int) -> int:
    """Return a size of device memory. Raise InvalidRequestError for one that no device can have."""
    return _at_most(value, MAX_STEP, "size_bytes")


def position(value: int, field: str) -> float:
    """Return a position in the trace. Raise InvalidRequestError if it is not exact as a floating-point number."""
    return float(_at_most(value, MAX_STEP, field))


def batch(items: Sequence[ItemT], field: str, limit: int = MAX_BATCH) -> Sequence[ItemT]:
    """Return the items of a request. Raise InvalidRequestError if they are more than `limit`."""
    if len(items) > limit:
        raise InvalidRequestError(
            f"{field} has {len(items)} entries; at most {limit} are allowed: send several requests"
        )
    return items


def client_state(value: bytes) -> bytes:
    """Return a rank's client state. Raise InvalidRequestError if it has more bytes than a commit may carry."""
    if len(value) > MAX_CLIENT_STATE_BYTES:
        raise InvalidRequestError(
            f"client_state has {len(value)} bytes; at most {MAX_CLIENT_STATE_BYTES} are allowed: keep large things in "
            "tensors or files of their own"
        )
    return value


def job_spec(request: pb.OpenJobRequest) -> JobSpec:
    """Return the job that a client wants to open.

    It can raise InvalidRequestError, which names the field that is wrong.
    """
    if not 0 < request.world_size < 1 << 20 or not 0 < request.attached_ranks <= request.world_size:
        raise InvalidRequestError(
            f"world_size {request.world_size} and attached_ranks {request.attached_ranks} must be positive, "
            "the second not above the first"
        )
    if request.rank >= request.world_size:
        raise InvalidRequestError(f"rank {request.rank} is not below world_size {request.world_size}")
    parameters = tuple(
        ParameterSpec(
            fqn=name(p.fqn, "parameters.fqn"),
            shape=_shape(p),
            dtype=_lookup(DTYPE_FROM_WIRE, p.dtype, f"dtype of parameter {p.fqn!r}"),
            trainable=p.trainable,
        )
        for p in batch(request.parameters, "parameters", MAX_PARAMETERS)
    )
    if len({p.fqn for p in parameters}) != len(parameters):
        raise InvalidRequestError("a parameter is listed twice in `parameters`")
    spec = JobSpec(
        name=name(request.job, "job"),
        world_size=request.world_size,
        local_ranks=request.attached_ranks,
        parameters=parameters,
        durability=durability(request.durability),
        layout=name(request.layout, "layout") if request.layout else "",
    )
    # `digest` and `by_name` of the job's model are computed at their first use and then kept. They take 0.2 s for
    # 100,000 parameters, so they are computed here on a worker thread, and not later on the event loop.
    _ = spec.model.digest, spec.model.by_name
    return spec


def parameter_to_wire(parameter: ParameterSpec) -> pb.Parameter:
    """Return a parameter as a client declared it."""
    return pb.Parameter(
        fqn=parameter.fqn,
        shape=parameter.shape,
        dtype=DTYPE_TO_WIRE[parameter.dtype],
        trainable=parameter.trainable,
    )


def tensor_range(message: pb.TensorRange) -> TensorRange:
    """Return a range of a tensor. Raise InvalidRequestError for a range that no tensor can have."""
    check_range(message)
    return TensorRange(message.fqn, kind(message.kind), message.offset, message.numel)


def check_range(message: pb.TensorRange) -> None:
    """Check a range. Raise InvalidRequestError for a range that no tensor can have."""
    if message.numel == 0 or max(message.offset, message.numel) > MAX_ELEMENTS:
        raise InvalidRequestError(
            f"range of {message.fqn!r}: offset {message.offset}, numel {message.numel} is no range"
        )


def durability(message: pb.Durability) -> Durability:
    """Return the durability class of a job. Raise InvalidRequestError unless exactly one class is set."""
    match message.WhichOneof("class"):
        case "step":
            return Durability(every_steps=1)
        case "none":
            return Durability(every_steps=0)
        case "snapshot" if 0 < message.snapshot.every_steps < 1 << 32:
            return Durability(every_steps=message.snapshot.every_steps)
        case "snapshot":
            raise InvalidRequestError(f"snapshot.every_steps {message.snapshot.every_steps} must be positive")
        case _:
            raise InvalidRequestError("durability is not set; set step, snapshot or none")


def durability_to_wire(value: Durability) -> pb.Durability:
    """Return the message for a durability class; this is the inverse of `durability`."""
    if value.every_steps == 0:
        return pb.Durability(none=pb.Durability.Volatile())
    if value.every_steps == 1:
        return pb.Durability(step=pb.Durability.Step())
    return pb.Durability(snapshot=pb.Durability.Snapshot(every_steps=value.every_steps))


def group_specs(job: JobSpec, groups: Sequence[pb.ShardGroup]) -> list[GroupSpec]:
    """Return the shard groups of a request.

    Raises:
        InvalidRequestError: a group is malformed, or leaves the parameters of the job.
    """
    batch(groups, "groups", MAX_GROUPS)
    if (shards := sum(len(group.shards) for group in groups)) > MAX_SHARDS:
        raise InvalidRequestError(f"groups have {shards} shards; at most {MAX_SHARDS} are allowed")
    specs = [group_spec(group) for group in groups]
    sizes = {parameter.fqn: math.prod(parameter.shape) for parameter in job.parameters}
    for spec in specs:
        for shard in spec.shards:
            if shard.fqn not in sizes:
                raise InvalidRequestError(
                    f"group {spec.name!r} has a shard of {shard.fqn!r}, which is no parameter of job {job.name!r}"
                )
            if shard.offset + shard.numel > sizes[shard.fqn]:
                raise InvalidRequestError(
                    f"group {spec.name!r}: {shard.numel} elements from {shard.offset} leave {shard.fqn!r}, which has "
                    f"{sizes[shard.fqn]}"
                )
    return specs


def group_spec(message: pb.ShardGroup) -> GroupSpec:
    """Return a shard group from a client's request. Raise InvalidRequestError if shards overlap or leave the group."""
    name(message.name, "groups.name")
    if message.numel > MAX_ELEMENTS:
        raise InvalidRequestError(f"group {message.name!r}: numel {message.numel} is above {MAX_ELEMENTS}")
    batch(message.kinds, f"kinds of group {message.name!r}", len(Kind))
    spec = GroupSpec(
        name=message.name,
        numel=message.numel,
        shards=tuple(
            Shard(
                fqn=name(s.fqn, f"shards.fqn of group {message.name!r}"),
                offset=s.offset,
                numel=s.numel,
                group_offset=s.position,
            )
            for s in message.shards
        ),
        slabs=tuple(_slab_spec(message.name, k) for k in message.kinds),
    )
    spec.validate()
    _check_kinds(spec)
    return spec


def _check_kinds(group: GroupSpec) -> None:
    """Check that an optimizer can update the group, or that it is frozen. Raise InvalidRequestError otherwise."""
    kinds = group.slab_of_kind
    full_precision = kinds[Kind.PARAM].dtype is DType.FLOAT32
    if full_precision and Kind.MASTER in kinds:
        raise InvalidRequestError(f"group {group.name!r}: kind param is float32 and is the master weight itself")
    if Kind.GRAD in kinds and not full_precision and Kind.MASTER not in kinds:
        raise InvalidRequestError(
            f"group {group.name!r} has kind grad, and its param is {kinds[Kind.PARAM].dtype.value}: updates need kind "
            "master"
        )


def _slab_spec(group: str, message: pb.KindSpec) -> SlabSpec:
    tier = _lookup(TIER_FROM_WIRE, message.placement, f"placement of group {group!r}")
    slab = SlabSpec(
        kind=kind(message.kind),
        dtype=_lookup(DTYPE_FROM_WIRE, message.dtype, f"dtype of group {group!r}"),
        placement=tier,
        codec=name(message.codec, f"codec of group {group!r}") if message.codec else PLAIN,
    )
    if slab.kind in OPTIMIZER_STATES | {Kind.MASTER} and slab.dtype is not DType.FLOAT32:
        raise InvalidRequestError(f"group {group!r}: kind {slab.kind.value} must be float32, not {slab.dtype.value}")
    return slab


def optimizer_update(
    group: GroupSpec, update: pb.ApplyGradientsRequest.GroupUpdate, hyper_parameters: Sequence[HyperParameters]
) -> OptimizerUpdate:
    """Return the kernel that updates one group. Raise InvalidRequestError if the request does not fit the group."""
    indexes = update.hyper_parameters_of_shard
    if len(indexes) != len(group.shards):
        raise InvalidRequestError(
            f"group {group.name!r} has {len(group.shards)} shards, hyper_parameters_of_shard has {len(indexes)} entries"
        )
    if any(not -1 <= index < len(hyper_parameters) for index in indexes):
        raise InvalidRequestError(
            f"group {group.name!r}: hyper_parameters_of_shard must be -1 or an index below {len(hyper_parameters)}"
        )
    if not math.isfinite(update.grad_scale):
        raise InvalidRequestError(f"group {group.name!r}: grad_scale {update.grad_scale} is not finite")
    clip_value = update.grad_clip_value if update.HasField("grad_clip_value") else None
    if clip_value is not None and not (math.isfinite(clip_value) and clip_value > 0):
        raise InvalidRequestError(f"group {group.name!r}: grad_clip_value {clip_value} must be positive and finite")
    for index in set(indexes) - {-1}:
        shards = [shard for shard, of_shard in zip(group.shards, indexes, strict=True) if of_shard == index]
        _check_states(group, shards, hyper_parameters[index])
    return OptimizerUpdate(
        shards=group.shards,
        hyper_parameters=[None if index < 0 else hyper_parameters[index] for index in indexes],
        grad_scale=update.grad_scale,
        clip_value=clip_value,
    )


def _check_states(group: GroupSpec, shards: Sequence[Shard], row: HyperParameters) -> None:
    """Check that some shards have the states that the optimizer needs. Raise InvalidRequestError otherwise."""
    needed = {KIND_FROM_WIRE[kind] for kind in state_kinds(row)}
    for shard in shards:
        if missing := sorted(kind.value for kind in needed if not group.keeps(kind, shard)):
            raise InvalidRequestError(
                f"{shard.fqn!r} in group {group.name!r} cannot be updated by {row.WhichOneof('optimizer')}: it was "
                f"registered without {', '.join(missing)}"
            )


def hyper_parameters(message: HyperParameters) -> HyperParameters:
    """Check the hyper-parameters of an optimizer that a client sends, and return them unchanged.

    Raises:
        InvalidRequestError: torch's class would refuse a value; the message names the field.
    """
    if problem := find_problem(message):
        raise InvalidRequestError(problem)
    return message


def _shape(parameter: pb.Parameter) -> tuple[int, ...]:
    shape = tuple(batch(parameter.shape, f"shape of parameter {parameter.fqn!r}", MAX_DIMENSIONS))
    if math.prod(shape) > MAX_ELEMENTS:
        raise InvalidRequestError(
            f"parameter {parameter.fqn!r} of shape {list(shape)} has more than {MAX_ELEMENTS} elements"
        )
    return shape


def _at_most(value: int, limit: int, field: str) -> int:
    if value > limit:
        raise InvalidRequestError(f"{field} is {value}; at most {limit} is allowed")
    return value


def _lookup(table: Mapping[KeyT, ValueT], value: KeyT, field: str) -> ValueT:
    """Return the table's value for the wire's value. Raise InvalidRequestError if the table has none."""
    if value not in table:
        raise InvalidRequestError(f"{field} has the value {value!r}, which this store does not know")
    return table[value]
