"""The bytes that a job takes of a store, computed from its declaration alone with the records of the storage engine.

`paramserver plan`, which is a client in the package `trainer_client`, gets this function as an argument, because
`trainer_client` imports nothing of the storage engine. This module must never open a store.
tests/integration/test_plan.py compares the figures with those of a daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paramserver.config import DaemonConfig
from paramserver.contract.limits import GRADIENTS_AT_ONCE, UNITS_MAPPED_AT_ONCE
from paramserver.contract.store_need import RefusedJobError, StoreNeed
from paramserver.rpc import convert
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.config import PREFETCH_BYTES
from storage.base.errors import InvalidRequestError
from storage.base.shard import GroupSpec, JobSpec, Kind, SlabKey, TierName
from storage.state.need import HostNeed, spilled_bytes, versions_needed
from storage.state.slab import Group, Slab, Tally
from storage.steps.transform import host_budget_for, tile_buffer_bytes
from storage.tiers.base import round_up
from storage.tiers.slots import FIRST_SLOT_BYTE, SLOT_BYTES


def find_need(
    request: pb.OpenJobRequest, groups: Sequence[pb.ShardGroup], host_budget: int, boundaries: Sequence[int] = ()
) -> StoreNeed:
    """Return the bytes that a job takes of one store whose host budget is `host_budget` bytes.

    Args:
        request: the request of any of the ranks that share the store.
        groups: the shard groups of all these ranks.
        boundaries: the sizes of the boundaries of activation checkpoints that each of these ranks moves to the store in
            a forward, oldest first.

    Raises:
        RefusedJobError: the declaration is not one that a store accepts.
    """
    try:
        spec = convert.job_spec(request)
        described = convert.group_specs(spec, groups)
    except InvalidRequestError as error:
        raise RefusedJobError(str(error)) from error
    tally = Tally()
    updated: Counter[TierName | None] = Counter()
    for each in described:
        group = _group(spec, each, tally)
        tally.add(group)
        if group.gradient_bytes:
            for slab in group.slabs:
                updated[slab.backing] += slab.paged_bytes
    host = HostNeed.of(
        [(tally, spec.local_ranks)],
        units_of_a_rank_alone=UNITS_MAPPED_AT_ONCE,
        gradients_of_a_rank=GRADIENTS_AT_ONCE,
    )
    header = round_up(FIRST_SLOT_BYTE + DaemonConfig.model_fields["max_sessions"].default * SLOT_BYTES)
    buffers = tile_buffer_bytes(host_budget)
    # The storage engine keeps all gradients in host memory if they fit there, and then spills no gradient.
    fits = host.fits_without_spilling(host_budget, header + buffers)
    nvme = tally.missing_bytes(
        TierName.NVME, lambda backing: versions_needed(spec, backing, TierName.NVME, is_durable=True)
    )
    # All ranks of the node move their boundaries at the same time, so each boundary's size counts once for each rank.
    sizes = [round_up(nbytes) for nbytes in boundaries for _ in range(spec.local_ranks)]
    spills = not host.keeps_activations(sum(sizes), host_budget, header + buffers)
    room = host.room_for_parked(host_budget, header + buffers, PREFETCH_BYTES)
    spilled = spilled_bytes(sizes, room) if spills else 0
    one_of_each_rank = spec.local_ranks * max(sizes, default=0)
    # A daemon that reserves NVMe room for spilled activations reserves room for all gradients there, too.
    may_all = not fits or bool(spills and sizes)
    return StoreNeed(
        home_bytes=host.home_bytes,
        gradient_bytes=host.all_gradient_bytes if fits else host.gradient_bytes,
        placed_gradient_bytes=tally.leaving_gradient_bytes(may_all=False),
        spilled_gradient_bytes=tally.leaving_gradient_bytes(may_all=not fits),
        boundary_bytes=sum(sizes),
        boundary_host_bytes=sum(sizes) - spilled,
        spilled_boundary_bytes=spilled,
        units_bytes=host.units_bytes,
        units=host.units,
        buffer_bytes=buffers,
        header_bytes=header,
        passing_bytes=sum(tally.passing),
        least_host_budget=host_budget_for(header + host.total + one_of_each_rank),
        ample_host_budget=host_budget_for(header + host.room_without_spilling + one_of_each_rank),
        version_bytes=tally.paged_bytes,
        written_bytes=tally.by_backing[TierName.NVME],
        updated_bytes=updated[TierName.NVME],
        volatile_bytes=updated[None],
        nvme_bytes=nvme + tally.leaving_gradient_bytes(may_all=may_all) + (sum(sizes) if spills else 0),
    )


def _group(job: JobSpec, spec: GroupSpec, tally: Tally) -> Group:
    """Return a group with its slabs, as JobRegistry makes them in a store without volatile backing tiers."""
    slabs = []
    for slab in spec.slabs:
        if slab.kind is not Kind.GRAD:
            volatile = slab.placement is TierName.HOST and job.durability.every_steps != 1
            backing = None if volatile else TierName.NVME
            slabs.append(Slab(SlabKey(job.identity, spec.name, slab.kind), slab, spec.numel, backing, tally))
    return Group(spec, tuple(slabs))
