"""The slot table of a flat buffer: where each parameter lies, and which partition each rank owns.

A slot table follows from the parameters' sizes and the number of ranks, so the module owns nothing.

[Note: flat groups] The parameters of a unit that share compute dtype and requires_grad lie in one flat buffer, each
starting at a multiple of 16 elements. The buffer is padded so that it divides into `world_size` partitions of n
elements each, where n is a multiple of 16; rank r owns elements [r * n, (r + 1) * n). The result of an all-gather of
the partitions is therefore the flat buffer itself, and no copy follows. The 16 comes from torch's fused CPU AdamW,
which rounds the last `numel % 16` elements of a call differently. Because every cut is at a multiple of 16, any number
of ranks gives the same bits. A large partition is padded to whole pages, so that it can be mapped to its place in the
flat buffer (see flat_memory.py). This padding takes at most 0.4 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paramserver.contract.limits import ELEMENT_ALIGNMENT
from trainer_client.base.alignment import round_up

# PAGE_ELEMENTS elements fill whole pages of 4 KiB: one page with 16-bit elements, two pages with 32-bit elements. A
# partition of at least PAGED_PARTITION elements is rounded up to a multiple of PAGE_ELEMENTS, so that it can be mapped
# instead of copied.
PAGE_ELEMENTS = 2048
PAGED_PARTITION = 256 * PAGE_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a parameter, or of a tile of one, in the flat buffer.

    Attributes:
        offset: the position of the slot's first element in the flat buffer.
        numel: how many elements the slot has.
        first: the element of the flattened parameter that lies at `offset`; 0 except for a tile.
    """

    fqn: str
    offset: int
    numel: int
    first: int = 0

    def first_gap(self, held: Iterable[tuple[int, int]]) -> int | None:
        """Return the first element of the slot that is in no range of `held`; None if the ranges have all elements.

        The result is an index of the flattened parameter.

        Args:
            held: ranges of the flattened parameter, as (first element, number of elements).
        """
        end = self.first
        for first, count in sorted(held):
            if first > end:
                break
            end = max(end, first + count)
        return end if end < self.first + self.numel else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """The part of a parameter that lies in one rank's partition; all numbers are in elements.

    Attributes:
        slot: index of the parameter in SlotTable.slots.
        fqn: name of the parameter.
        offset: first element of the part in the flattened parameter.
        numel: number of elements of the part.
        partition_offset: first element of the part in the partition.
    """

    slot: int
    fqn: str
    offset: int
    numel: int
    partition_offset: int

    @property
    def in_partition(self) -> slice:
        """The range of the partition in which the part lies, in elements."""
        return slice(self.partition_offset, self.partition_offset + self.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTable:
    """The slots of a flat buffer, and its partitions; see [Note: flat groups].

    Attributes:
        slots: the places of the parameters.
        partition_numel: number of elements that each rank owns.
        world_size: number of ranks.
    """

    slots: tuple[Slot, ...]
    partition_numel: int
    world_size: int

    @property
    def numel(self) -> int:
        """Number of elements of the flat buffer, with padding."""
        return self.partition_numel * self.world_size

    def partition_range(self, rank: int) -> tuple[int, int]:
        """Return the [start, stop) of a rank's partition in the flat buffer."""
        return rank * self.partition_numel, (rank + 1) * self.partition_numel

    def shards_of(self, rank: int) -> tuple[ShardRange, ...]:
        """Return the parts of parameters that lie in a rank's partition, in the order in which they lie there."""
        start, stop = self.partition_range(rank)
        shards = []
        for index, slot in enumerate(self.slots):
            first = max(slot.offset, start)
            last = min(slot.offset + slot.numel, stop)
            if first < last:
                shards.append(
                    ShardRange(
                        slot=index,
                        fqn=slot.fqn,
                        offset=slot.first + first - slot.offset,
                        numel=last - first,
                        partition_offset=first - start,
                    )
                )
        return tuple(shards)

    def whole(self) -> tuple[ShardRange, ...]:
        """Return one part for each parameter, with its position in the flat buffer, as if there were one rank alone."""
        return tuple(
            ShardRange(slot=index, fqn=slot.fqn, offset=slot.first, numel=slot.numel, partition_offset=slot.offset)
            for index, slot in enumerate(self.slots)
            if slot.numel
        )


def make_slot_table(
    sizes: Sequence[tuple[str, int]], world_size: int, firsts: Sequence[int] | None = None
) -> SlotTable:
    """Lay out parameters, given as (FQN, number of elements), one after the other; see [Note: flat groups].

    Args:
        firsts: for each parameter 0, and for each tile its first element in the flattened parameter; None: all are 0.
    """
    slots = []
    offset = 0
    for (fqn, numel), first in zip(sizes, firsts or [0] * len(sizes), strict=True):
        slots.append(Slot(fqn=fqn, offset=offset, numel=numel, first=first))
        offset += round_up(numel, ELEMENT_ALIGNMENT)
    # A partition has at least ELEMENT_ALIGNMENT elements, so a flat group whose parameters have no elements has a
    # partition, too.
    partition_numel = max(round_up(offset, ELEMENT_ALIGNMENT * world_size) // world_size, ELEMENT_ALIGNMENT)
    if world_size > 1 and partition_numel >= PAGED_PARTITION:
        partition_numel = round_up(partition_numel, PAGE_ELEMENTS)
    return SlotTable(slots=tuple(slots), partition_numel=partition_numel, world_size=world_size)
