"""The two ways to gather a unit's parameters: an all-gather of the ranks' partitions, or reads of them in the store.

A gather is split into start and finish. This module owns nothing between two gathers, and no lease. It must never
decide when to gather, because step/hooks.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from paramserver.contract.kinds import PARAM
from trainer_client.base.lanes.lanes import WHOLE, Lanes
from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.journal import SlabName
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.errors import ConfigError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.ranks.lockstep import Lockstep


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """When the bytes that a gather reads are needed again. The store chooses its device copies by these positions.

    Attributes:
        before_update: the position of the next use of the unit before an update; None: there is none, or it is not
            known.
        at_all: the position of the next use of the unit, which may come after an update. It counts for frozen
            parameters, because an update does not change their bytes.
    """

    before_update: int | None
    at_all: int | None

    def of(self, group: FlatGroup) -> int | None:
        """Return the position at which the present bytes of a group are needed again."""
        return self.before_update if group.trainable else self.at_all


def is_one_sided(asked: str, *, far: str | None, parameters_on_device: bool, on_cpu: bool) -> bool:
    """Return whether each rank reads the partitions of all ranks in its store's memory (a one-sided gather).

    If not, each rank reads its own partition, and the ranks make an all-gather of the partitions.

    Args:
        asked: the value of the config key `paramserver.gather`.
        far: why not all ranks can read the memory of one store, or None if they can.
        parameters_on_device: whether parameters live on the devices of the ranks.
        on_cpu: whether the ranks compute on CPUs.

    Raises:
        ConfigError: the config asks for one-sided gathers, and they are not possible.
    """
    if asked == "store" and far is not None:
        raise ConfigError(f'paramserver.gather = "store": {far}: write "auto" or "collective"')
    if asked == "store" and parameters_on_device:
        raise ConfigError(
            'paramserver.gather = "store": the parameters live on the devices of the ranks, not in the store; write '
            '"auto" or "collective", or place them there (zero_optimization.offload_param)'
        )
    # With "auto", ranks on the CPU gather from the store, because parameters in the arena are mapped in place there,
    # which is faster than any copy or collective.
    return asked == "store" or (asked == "auto" and on_cpu and far is None and not parameters_on_device)


class Gather(Protocol):
    """The interface of the two ways to gather, which `Unit` calls: `CollectiveGather` and `OneSidedGather`.

    The argument `groups` of all methods has the flat groups of one unit.
    """

    @property
    def is_one_sided(self) -> bool:
        """Whether a rank can gather by itself, without the other ranks."""

    def slabs(self, groups: Sequence[FlatGroup]) -> list[SlabName]:
        """Return the slabs that `start` leases, in the same order."""

    def leased_bytes(self, groups: Sequence[FlatGroup]) -> int:
        """Return the total bytes of the slabs that `start` leases."""

    def start(
        self, groups: Sequence[FlatGroup], position: int, reuse: Reuse | None = None
    ) -> Pending[list[LeasedBytes]] | None:
        """Request the leases, and return their future; None if there is nothing to lease. It does not wait.

        Args:
            groups: the groups of the unit.
            position: the position of the use.
            reuse: when the bytes are needed again; None: the store keeps no device copy of them.
        """

    def finish(self, groups: Sequence[FlatGroup], leases: Sequence[LeasedBytes], *, may_map: bool) -> list[LeasedBytes]:
        """Fill the flat buffers with the leased bytes. On an accelerator, only begin the copies, see Lanes.

        Args:
            groups: the groups of the unit.
            leases: the leases that `start` has requested.
            may_map: allows to map leased bytes instead of copying them.

        Returns:
            The leases whose bytes are mapped. They have to be held until the groups are freed, or until `copy_mapped`
            of the groups was called. The other leases can be released as soon as the copies are done.
        """

    def abandon(self, groups: Sequence[FlatGroup], error: BaseException) -> None:
        """End this rank's part in a gather that `start` has begun and that has failed with `error` on this rank.

        If other ranks take part in the gather, this rank leaves its process groups, so that they get an error at once.
        """


class CollectiveGather:
    """A gather by an all-gather of the ranks' partitions. Each rank leases its own partition, or has it on its device.

    All ranks must call this, for the same units in the same order.
    """

    is_one_sided = False

    def __init__(self, leases: SlabLeases, collectives: Collectives, lanes: Lanes) -> None:
        self._leases = leases
        self._collectives = collectives
        self._lanes = lanes
        self._lockstep = Lockstep(collectives)

    def slabs(self, groups: Sequence[FlatGroup]) -> list[SlabName]:
        return [group.slab(PARAM) for group in groups if group.partition is None]

    def leased_bytes(self, groups: Sequence[FlatGroup]) -> int:
        return sum(group.partition_bytes for group in groups if group.partition is None)

    def start(
        self, groups: Sequence[FlatGroup], position: int, reuse: Reuse | None = None
    ) -> Pending[list[LeasedBytes]] | None:
        self._lockstep.announce(groups[0].unit)
        slabs = self.slabs(groups)
        next_uses = None if reuse is None else [reuse.of(group) for group in groups if group.partition is None]
        return self._leases.acquire_read(slabs, position, next_uses) if slabs else None

    @torch.no_grad()
    def finish(self, groups: Sequence[FlatGroup], leases: Sequence[LeasedBytes], *, may_map: bool) -> list[LeasedBytes]:
        if not groups:
            return []
        unit = groups[0].unit
        self._lockstep.confirm(unit)
        fetched = iter(leases)
        for group in groups:
            leased = next(fetched) if group.partition is None else None
            source, pieces = (group.partition, WHOLE) if leased is None else _source(leased, group.dtype)
            assert source is not None, "a partition is leased, or on the device"
            group.allocate()
            with (
                _in_order(leased),
                self._lanes.gathering(group.flat, group.start, group.stop, source, pieces) as (whole, partition),
            ):
                self._collectives.gather_unit(whole, partition, f"the gather of {unit}")
            if leased is not None and leased.keep is not None:
                leased.keep.keep(group.flat[group.start : group.stop])
        return []

    def abandon(self, groups: Sequence[FlatGroup], error: BaseException) -> None:
        # This rank will take no part in the all-gather of the failed gather, for which the other ranks may already
        # wait. So this rank abandons the run, which ends their wait.
        self._collectives.process_groups.abandon(f"the gather of {groups[0].unit}" if groups else "a gather", error)


class OneSidedGather:
    """A gather without communication between ranks: each rank leases the partitions of all ranks.

    All ranks have to share one store, which has the partitions of all groups. On the CPU a partition is mapped instead
    of copied, if it consists of whole pages. Ranks may use different units, in any order. When all ranks have handed
    their gradients over, a barrier of all ranks must follow before any rank gathers. Without the barrier, a rank could
    read another rank's partition before the store has that rank's gradient, and so before the partition's update.
    """

    is_one_sided = True

    def __init__(self, leases: SlabLeases, world_size: int, lanes: Lanes) -> None:
        self._leases = leases
        self._world_size = world_size
        self._lanes = lanes

    def slabs(self, groups: Sequence[FlatGroup]) -> list[SlabName]:
        return [group.slab(PARAM, rank) for group in groups for rank in range(self._world_size)]

    def leased_bytes(self, groups: Sequence[FlatGroup]) -> int:
        return sum(group.whole_bytes for group in groups)

    def start(
        self, groups: Sequence[FlatGroup], position: int, reuse: Reuse | None = None
    ) -> Pending[list[LeasedBytes]]:
        next_uses = None
        if reuse is not None:
            next_uses = [reuse.of(group) for group in groups for _ in range(self._world_size)]
        return self._leases.acquire_read(self.slabs(groups), position, next_uses)

    @torch.no_grad()
    def finish(self, groups: Sequence[FlatGroup], leases: Sequence[LeasedBytes], *, may_map: bool) -> list[LeasedBytes]:
        mapped = []
        partitions = iter(leases)
        for group in groups:
            group.allocate()
            for rank in range(self._world_size):
                leased = next(partitions)
                if may_map and group.map_partition(rank, leased):
                    mapped.append(leased)
                    continue
                first, last = group.slot_table.partition_range(rank)
                source, pieces = _source(leased, group.dtype)
                with _in_order(leased):
                    if leased.on_device is not None:
                        group.flat[first:last].copy_(source)
                    else:
                        self._lanes.copy_in(group.flat[first:last], source, pieces)
                if leased.keep is not None:
                    leased.keep.keep(group.flat[first:last])
        return mapped

    def abandon(self, groups: Sequence[FlatGroup], error: BaseException) -> None:
        """Do nothing, because no other rank takes part in a one-sided gather, so none waits for this rank."""


def _source(leased: LeasedBytes, dtype: torch.dtype) -> tuple[torch.Tensor, Iterable[slice]]:
    """Return the two arguments with which `Lanes` copies a leased partition: a tensor and its pieces.

    The tensor has elements of `dtype` if the partition is in a device copy, and bytes if it is in host memory.
    """
    if leased.on_device is not None:
        return leased.data.view(dtype), WHOLE
    return leased.data, leased.pieces()


def _in_order(leased: LeasedBytes | None) -> AbstractContextManager[None]:
    """Return a context for the use of a leased partition.

    If the partition is in a device copy, the device begins the use after the last use of the copy's memory.
    """
    return nullcontext() if leased is None or leased.on_device is None else leased.on_device.memory.in_order()
