"""The copies of parameters on a planned rank's device: how much memory they take, and which reads they save.

This module owns the order in which a rank reads its units. It must never decide which copy stays, because the
directory of the store does.
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

# The copies that stay on the device are the same from step to step after so many of them.
_SETTLED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCopies:
    """The copies on the device of one rank.

    Attributes:
        nbytes: the memory that the rank offers for them.
        reads: the number of reads of parameters in a step.
        hits: those of them that find their bytes on the device.
        hit: the fraction of the bytes of these reads that are found there.
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
        micro_batches: of a step.
        find_hits: the store's rule.
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

    The root surrounds both passes, and the unit whose forward ends last stays for the backward. The backward ends at
    the first unit that has something to train, or that a trained parameter of the root comes before: an embedding, and
    not a head. The order of parameters in the model is taken to be that of their use.
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
    """Return the units but the root in the order in which a forward reads them, and the one whose forward ends last.

    Tiles of the root come before the blocks or behind them, as their parameter does, and those of a tied weight are
    read once more, by the head. A block's forward ends after those of its tiles.
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
    """Yield the reads of the steps. An update of what is trained follows each of them, and then the next step."""
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
            # The job goes on after the planned steps, so it reads a frozen group again.
            next_use = position + len(sequence)
        following[slab, version] = position
        backwards.append(DeviceRead(slab=slab, version=version, nbytes=group.partition_bytes, next_use=next_use))
    return reversed(backwards)
