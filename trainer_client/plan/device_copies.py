"""The copies of parameters on a planned rank's device: how much memory they take, and which reads they serve.

This module owns the order in which a rank reads its units. It must never decide which copy stays on the device, because
the store's directory of device copies does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paramserver.contract.device_reads import DeviceRead, FindHits
from trainer_client.config.home import Home
from trainer_client.plan.layout import Layout, PlannedUnit
from trainer_client.training.model.placement import Residence
from trainer_client.training.run.device_budget import bytes_of_copies

# The plan replays this number of steps and counts the last one, because afterwards the same copies stay on the device
# in each step.
_SETTLED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCopies:
    """The device copies of one rank: the memory that they take, and how many of its reads they serve.

    Attributes:
        nbytes: the bytes of device memory that the rank offers for the copies.
        reads: the number of reads of parameters in a step.
        hits: the number of these reads that find their bytes on the device.
        hit: the fraction of the bytes of all these reads that are found on the device.
    """

    nbytes: int = 0
    reads: int = 0
    hits: int = 0
    hit: float = 0.0


NO_COPIES = PlannedCopies()


def plan_copies(
    layout: Layout, budget_bytes: int, micro_batches: int, find_hits: FindHits, partitions: int = 1
) -> PlannedCopies:
    """Return the copies of a rank whose `paramserver.gpu_budget` is `budget_bytes`, on an accelerator.

    Args:
        micro_batches: the number of micro-batches of a step.
        find_hits: the daemon's function that says which reads find their bytes on the device.
        partitions: how many ranks' partitions of a group the rank reads in one gather.
    """
    placed = {planned.group.name: planned.placement for planned in layout.groups}
    most = bytes_of_copies((planned.group for planned in layout.groups), placed, partitions)
    nbytes = min(budget_bytes, most)
    if not nbytes:
        return NO_COPIES
    uses = [unit for _ in range(micro_batches) for unit in reads_of_pass(layout.units)]
    reads = list(_reads([uses] * _SETTLED_STEPS, partitions))
    found = find_hits(reads, nbytes)
    count = len(reads) // _SETTLED_STEPS
    last = list(zip(reads, found, strict=True))[-count:]
    total = sum(read.nbytes for read, _ in last)
    return PlannedCopies(
        nbytes=nbytes,
        reads=count,
        hits=sum(is_hit for _, is_hit in last),
        hit=sum(read.nbytes for read, is_hit in last if is_hit) / total,
    )


def reads_of_pass(units: Sequence[PlannedUnit]) -> list[PlannedUnit]:
    """Return the units in the order in which a forward and its backward read them.

    The root is read once, because it stays gathered during both passes. The unit whose forward ends last is not read
    again, because it stays gathered for the backward. The backward ends at the first unit that has a trained parameter,
    or that comes after a trained parameter of the root. For example, it reads all units if an embedding in the root is
    trained, but not because of a trained head. Parameters are assumed to be used in the order in which they are in the
    model.
    """
    root, *others = units
    forward, stays = _forward(others)
    first = next((place for place, unit in enumerate(forward) if unit.first_trained is not None), len(forward))
    if (trained := root.first_trained) is not None:
        behind = (place for place, unit in enumerate(forward) if unit.first_index > trained)
        first = min(first, next(behind, len(forward)))
    again = forward[first:][::-1]
    if stays in again:
        again.remove(stays)
    return [root, *forward, *again]


def _forward(others: Sequence[PlannedUnit]) -> tuple[list[PlannedUnit], PlannedUnit | None]:
    """Return all units but the root in the order in which a forward reads them, and the unit whose forward ends last.

    Tiles of a parameter of the root come before or after the blocks, where the parameter is in the model. Tiles of a
    tied weight are read once more after the blocks, by the head. The forward of a block ends after the forwards of its
    tiles, so the unit that ends last is no tile of a block.
    """
    number = next((place for place, unit in enumerate(others) if not unit.is_tile), len(others))
    of_root, blocks = others[:number], list(others[number:])
    begin = min((unit.first_index for unit in blocks if unit.first_index >= 0), default=math.inf)
    before = [tile for tile in of_root if tile.first_index < begin]
    behind = [tile for tile in of_root if tile.first_index > begin]
    behind += [tile for tile in of_root for _ in range(tile.uses - 1)]
    ends = behind or [block for block in blocks if not block.is_tile] or before
    return [*before, *blocks, *behind], ends[-1] if ends else None


def _reads(steps: Sequence[Sequence[PlannedUnit]], partitions: int) -> Iterator[DeviceRead]:
    """Yield a rank's reads of parameters in several steps, each with the version of the group that it reads.

    After each step, an update makes a new version of each trained group, so copies of the former version serve no read.
    """
    sequence = [
        (planned.group, partition, step)
        for step, units in enumerate(steps)
        for unit in units
        for planned in unit.groups
        if planned.placement.residence is Residence.SHARDED and planned.placement.parameters is not Home.DEVICE
        for partition in range(partitions)
    ]
    following: dict[tuple[str, int], int] = {}
    backwards: list[DeviceRead] = []
    for position in range(len(sequence) - 1, -1, -1):
        group, partition, step = sequence[position]
        slab = f"{group.name} {partition}"
        version = step if group.trainable else 0
        next_use = following.get((slab, version))
        if next_use is None and not group.trainable:
            # The job goes on after the planned steps, so the next use of a frozen group is in the step after them.
            next_use = position + len(sequence)
        following[slab, version] = position
        backwards.append(DeviceRead(slab=slab, version=version, nbytes=group.partition_bytes, next_use=next_use))
    return reversed(backwards)
