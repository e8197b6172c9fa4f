"""The bytes that a job takes of a store. The daemon's side computes them, and the client's planner uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paramserver.v1 import parameter_store_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreNeed:
    """The bytes that a job takes of one store, all ranks of the node together.

    The bytes of slabs are rounded up to whole pages.

    Attributes:
        home_bytes: host memory for the slabs that are placed in host memory.
        gradient_bytes: host memory for gradients. If all gradients of a step that are placed in host memory fit into
            the host budget, it is the room for these, and for the largest others that the ranks can have at once. If
            not, it is the room for the largest gradients that the ranks can have at once without parking them.
        placed_gradient_bytes: bytes of the gradients that are placed on NVMe.
        spilled_gradient_bytes: bytes on NVMe for gradients: for those that are placed on NVMe, or for all gradients if
            the others do not fit into the host budget.
        boundary_bytes: bytes of the boundaries of activation checkpoints that the store has at once, after a forward.
        boundary_host_bytes: host memory that these boundaries take: for all of them, or what the rest of a step leaves.
        spilled_boundary_bytes: bytes of the boundaries that are written to NVMe, because host memory has no room.
        units_bytes: host memory for the units that ranks have leased at once and that are not placed in host memory.
        units: number of these units.
        buffer_bytes: host memory for the optimizer's buffers, which depends on the host budget that the caller gave.
        header_bytes: host memory for the arena's header.
        passing_bytes: bytes of the parameters that are not placed in host memory, and only pass through it.
        least_host_budget: the smallest host budget with which the daemon admits the job and has room for a boundary of
            each rank.
        ample_host_budget: the smallest host budget with which all gradients that are placed in host memory stay there.
        version_bytes: bytes of one version of all slabs.
        written_bytes: bytes of the slabs whose every version goes to NVMe.
        updated_bytes: the part of `written_bytes` that an update replaces: the slabs of groups that have a gradient.
        volatile_bytes: bytes of those slabs of groups with a gradient that are not written at every version. Between
            two snapshots they are only in host memory.
        nvme_bytes: bytes on NVMe that the daemon reserves for all versions of the job, for spilled gradients, and for
            boundaries if some are spilled.
    """

    home_bytes: int
    gradient_bytes: int
    placed_gradient_bytes: int
    spilled_gradient_bytes: int
    boundary_bytes: int
    boundary_host_bytes: int
    spilled_boundary_bytes: int
    units_bytes: int
    units: int
    buffer_bytes: int
    header_bytes: int
    passing_bytes: int
    least_host_budget: int
    ample_host_budget: int
    version_bytes: int
    written_bytes: int
    updated_bytes: int
    volatile_bytes: int
    nvme_bytes: int

    @property
    def host_bytes(self) -> int:
        """The most bytes of host memory, without boundaries, that the store cannot evict at some moment of a step."""
        return self.home_bytes + self.gradient_bytes + self.units_bytes + self.buffer_bytes + self.header_bytes


class RefusedJobError(Exception):
    """A store would refuse the job as it is declared. The text says why."""


FindNeed: TypeAlias = Callable[[pb.OpenJobRequest, Sequence[pb.ShardGroup], int, Sequence[int]], StoreNeed]
"""A function of four arguments.

They are the request that opens a job, the groups of all ranks that share the store, the host budget, and the sizes of
the boundaries that one rank moves to the store in a forward, oldest first. It can raise RefusedJobError.
"""
