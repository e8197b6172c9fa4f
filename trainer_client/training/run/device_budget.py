"""The memory that a job needs on a rank's device, compared with the free memory before anything is allocated.

This module owns the number of bytes and the error. It must never count what it cannot know: activations, and tensors of
the script.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paramserver.contract.sizes import shown_size
from trainer_client.client.transport.device_memory import room_for
from trainer_client.config.home import Home
from trainer_client.errors import ConfigError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.placement import GroupPlacement, Residence
from trainer_client.training.model.states import placement_bytes

# The number of units that are gathered at the same time: the root, the unit that computes, and the next one.
_UNITS_AT_ONCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedGroup:
    """A flat group, and the homes of its kinds of state, by which its bytes on the device are counted."""

    group: FlatGroup
    placement: GroupPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeed:
    """The bytes that one rank needs on its device.

    Attributes:
        homes: bytes of parameters, gradients and optimizer states whose home is the device, by kind.
        units: bytes of the largest units that are gathered at once.
        copies: bytes that the rank offers to the store for copies of parameters.
    """

    homes: Mapping[str, int]
    units: int
    copies: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of homes, gathered units and copies together."""
        return sum(self.homes.values()) + self.units + self.copies


def need_of(units: Iterable[Sequence[FlatGroup]], placed: Mapping[str, GroupPlacement], copies: int = 0) -> DeviceNeed:
    """Return the bytes that one rank needs on its device.

    Args:
        units: the flat groups of each unit, which may be on the meta device.
        placed: the placement of each group, by its name.
        copies: bytes that the rank offers to the store for copies of parameters.
    """
    units = [list(groups) for groups in units]
    homes = placement_bytes(_PlacedGroup(group=group, placement=placed[group.name]) for unit in units for group in unit)
    gathered = [
        sum(group.whole_bytes for group in groups if placed[group.name].residence is Residence.SHARDED)
        for groups in units
    ]
    return DeviceNeed(
        homes={kind: of_home.get(Home.DEVICE.value, 0) for kind, of_home in homes.items()},
        units=sum(heapq.nlargest(_UNITS_AT_ONCE, gathered)),
        copies=copies,
    )


def bytes_of_copies(groups: Iterable[FlatGroup], placed: Mapping[str, GroupPlacement], partitions: int) -> int:
    """Return the bytes that device copies of all parameters would take that a rank reads from the store.

    Args:
        groups: all flat groups, which may be on the meta device.
        placed: the placement of each group, by its name.
        partitions: how many partitions of each group the rank reads in one gather.
    """
    read = [
        group
        for group in groups
        if placed[group.name].residence is Residence.SHARDED and placed[group.name].parameters is not Home.DEVICE
    ]
    return partitions * sum(room_for(group.partition_bytes) for group in read)


def require_room(need: DeviceNeed, device: str, free_bytes: int, total_bytes: int) -> None:
    """Raise ConfigError unless the memory that a job needs on a device is free.

    Args:
        need: the bytes that the job needs on the device.
        device: name of the device, for the text of the error.
        free_bytes: the free bytes of the device's memory.
        total_bytes: all bytes of the device's memory.

    Raises:
        ConfigError: the job does not fit.
    """
    if need.nbytes <= free_bytes:
        return
    kept = ", ".join(f"{kind} {shown_size(nbytes)}" for kind, nbytes in need.homes.items() if nbytes)
    if need.copies:
        kept += f"{', ' if kept else ''}paramserver.gpu_budget {shown_size(need.copies)}"
    raise ConfigError(
        f"{device} has {shown_size(free_bytes)} of {shown_size(total_bytes)} free, and this job needs "
        f"{shown_size(need.nbytes)} there before any activation ({kept + ', ' if kept else ''}units that are "
        f"gathered at once {shown_size(need.units)}): set zero_optimization.stage 3 with offload_param and "
        "offload_optimizer, or paramserver.placement, to host memory or nvme, make the units smaller "
        "(paramserver.units), use more ranks, lower paramserver.gpu_budget, or free memory that other programs and "
        "tensors hold"
    )
