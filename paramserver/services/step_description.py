"""The description of a reader's step for a client that stores it elsewhere: everything but the bytes.

This module owns nothing. It must never hold the event loop for long, because a job may have 100,000 parameters and as
many groups.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from paramserver.rpc import convert
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.vocabulary import DTYPE_TO_WIRE, KIND_TO_WIRE, TIER_TO_WIRE
from storage.base.shard import GroupSpec
from storage.base.slices import in_slices
from storage.state.slab import Group
from storage.steps.reader import StepReader

# The most parameters in one message of a step's description. A message with groups is sent once it has this many
# shards.
PARAMETERS_A_MESSAGE = 1000
SHARDS_A_MESSAGE = 4000


async def describe_step(reader: StepReader) -> AsyncIterator[pb.DescribeStepResponse]:
    """Yield the description of a reader's step; parameter_store.proto says in which order."""
    spec, record = reader.job.spec, reader.record
    yield pb.DescribeStepResponse(
        step=pb.DescribeStepResponse.StepOfJob(
            job=spec.name,
            step=reader.step,
            layout=spec.layout,
            world_size=spec.world_size,
            durability=convert.durability_to_wire(spec.durability),
            committed_at_unix_seconds=record.committed_at,
            ranks=sorted(record.client_states),
        )
    )
    for start in range(0, len(spec.parameters), PARAMETERS_A_MESSAGE):
        some = spec.parameters[start : start + PARAMETERS_A_MESSAGE]
        yield pb.DescribeStepResponse(parameters=map(convert.parameter_to_wire, some))
    message, shards = pb.DescribeStepResponse(), 0
    async for group in in_slices(list(reader.job.groups.values())):
        message.groups.append(_describe_group(group, reader))
        shards += 1 + len(group.spec.shards)
        if shards >= SHARDS_A_MESSAGE:
            yield message
            message, shards = pb.DescribeStepResponse(), 0
    yield message


def _describe_group(group: Group, reader: StepReader) -> pb.DescribeStepResponse.StoredGroup:
    return pb.DescribeStepResponse.StoredGroup(
        group=_group_to_wire(group.spec),
        versions=[
            pb.DescribeStepResponse.SlabVersion(
                kind=KIND_TO_WIRE[slab.key.kind],
                version=reader.versions[slab],
            )
            for slab in group.slabs
        ],
    )


def _group_to_wire(spec: GroupSpec) -> pb.ShardGroup:
    return pb.ShardGroup(
        name=spec.name,
        numel=spec.numel,
        shards=[
            pb.Shard(fqn=shard.fqn, offset=shard.offset, numel=shard.numel, position=shard.group_offset)
            for shard in spec.shards
        ],
        kinds=[
            pb.KindSpec(
                kind=KIND_TO_WIRE[slab.kind],
                dtype=DTYPE_TO_WIRE[slab.dtype],
                placement=TIER_TO_WIRE[slab.placement],
                codec=slab.codec,
            )
            for slab in spec.slabs
        ],
    )
