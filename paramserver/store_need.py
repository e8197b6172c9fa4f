"""The bytes that a job takes of a store, computed from its declaration alone with the records of the storage engine.

`paramserver plan` gets this function, because the planner lies in `trainer_client`, which imports nothing of the
storage engine. This module must never open a store. tests/integration/test_store_need.py compares the figures with an
engine's.
"""

from __future__ import annotations

from collections.abc import Sequence

from paramserver.config import DaemonConfig
from paramserver.contract.limits import GRADIENTS_AT_ONCE, UNITS_MAPPED_AT_ONCE
from paramserver.contract.store_need import StoreNeed
from paramserver.rpc import convert
from paramserver.v1 import parameter_store_pb2 as pb
from storage.admission import HostNeed
from storage.shard import GroupSpec, JobSpec, Kind, SlabKey, TierName
from storage.slab import Group, Slab, Tally
from storage.tiers.base import round_up
from storage.tiers.slots import FIRST_SLOT_BYTE, SLOT_BYTES
from storage.transform import (
    BYTES_PER_TILE_ELEMENT,
    LEAST_TILE_BYTES,
    MOST_TILE_BYTES,
    TILE_BUDGET_FRACTION,
    TILE_QUANTUM,
    TILE_SETS,
    host_budget_for,
)

_UNITS_OF_A_RANK = 2


def find_need(request: pb.OpenJobRequest, groups: Sequence[pb.ShardGroup], host_budget: int) -> StoreNeed:
    """Return the bytes that a job takes of one store whose host budget is `host_budget` bytes.

    Args:
        request: the request of any of the ranks that share the store.
        groups: the shard groups of all these ranks.

    Raises:
        storage.errors.InvalidRequestError: the declaration is not one that a store accepts.
    """
    spec = convert.job_spec(request)
    tally = Tally()
    for group in convert.group_specs(spec, groups):
        tally.add(_group(spec, group, tally))
    ranks = spec.local_ranks
    leased = tally.passing[-(UNITS_MAPPED_AT_ONCE if ranks == 1 else _UNITS_OF_A_RANK * ranks) :]
    host = HostNeed(
        home_bytes=tally.home_bytes,
        gradient_bytes=sum(tally.gradients[-GRADIENTS_AT_ONCE * ranks :]),
        all_gradient_bytes=tally.gradient_bytes,
        units=len(leased),
        units_bytes=sum(leased),
    )
    header = round_up(FIRST_SLOT_BYTE + DaemonConfig.model_fields["max_sessions"].default * SLOT_BYTES)
    buffers = _buffer_bytes(host_budget)
    # The storage engine keeps all gradients in host memory if they fit, and spills none then.
    fits = header + buffers + host.total_without_spilling <= host_budget
    nvme = tally.missing_bytes(TierName.NVME, lambda backing: _versions(spec, backing))
    return StoreNeed(
        home_bytes=host.home_bytes,
        gradient_bytes=host.all_gradient_bytes if fits else host.gradient_bytes,
        spilled_gradient_bytes=0 if fits else host.all_gradient_bytes,
        units_bytes=host.units_bytes,
        units=host.units,
        buffer_bytes=buffers,
        header_bytes=header,
        passing_bytes=sum(tally.passing),
        least_host_budget=host_budget_for(header + host.total),
        version_bytes=tally.paged_bytes,
        written_bytes=tally.by_backing[TierName.NVME],
        nvme_bytes=nvme + (0 if fits else host.all_gradient_bytes),
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


def _versions(job: JobSpec, backing: TierName | None) -> int:
    """Return the number of versions for which the admission reserves room on NVMe, as storage/admission.py does."""
    settling = 1 if job.local_ranks < job.world_size else 0
    snapshots = 2 if job.durability.every_steps > 1 else 0
    return (0 if backing is None else 2 + settling) + snapshots


def _buffer_bytes(host_budget: int) -> int:
    """Return the bytes of the tile buffers, as TilePool of storage/transform.py cuts them."""
    room = max(LEAST_TILE_BYTES, min(host_budget // TILE_BUDGET_FRACTION, MOST_TILE_BYTES))
    quanta = room // BYTES_PER_TILE_ELEMENT // TILE_QUANTUM
    sets = min(quanta, TILE_SETS)
    return sets * round_up(quanta // sets * TILE_QUANTUM * BYTES_PER_TILE_ELEMENT)
