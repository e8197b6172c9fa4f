"""The slot table of a flat buffer: where each parameter lies, and which partition each rank owns.

All of this follows from sizes, so the module owns nothing.

[Note: flat groups] The parameters of a unit that share compute dtype and requires_grad lie in one flat buffer, each
starting at a multiple of 16 elements. The buffer is padded so that it divides into `world_size` partitions of n
elements each, where n is a multiple of 16; rank r owns elements [r * n, (r + 1) * n). An all-gather of the partitions
therefore *is* the flat buffer, and no copy-out follows. The 16 comes from torch's fused CPU AdamW, which rounds the
last `numel % 16` elements of a call differently: with every cut at a multiple of 16, any number of ranks gives the same
bits. Large partitions are whole pages, so that each can be mapped to its place in the flat buffer (see flat_memory.py).
That takes at most 0.4 % of padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paramserver.contract.limits import ELEMENT_ALIGNMENT
from trainer_client.base.alignment import round_up

# PAGE_ELEMENTS fill whole pages of 4 KiB: one with 16-bit elements, two with 32-bit ones. A partition of at least
# PAGED_PARTITION elements is rounded up to a multiple of PAGE_ELEMENTS.
PAGE_ELEMENTS = 2048
PAGED_PARTITION = 256 * PAGE_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a parameter, or of a tile of one, in the flat buffer.

    Attributes:
        offset: its first element in the flat buffer.
        numel: how many elements it has.
        first: the element of the flattened parameter that lies at `offset`; 0 except for a tile.
    """

    fqn: str
    offset: int
    numel: int
    first: int = 0

    def first_gap(self, held: Iterable[tuple[int, int]]) -> int | None:
        """Return the first of its elements that no range has, as an element of the parameter; None if all are there.

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
        """The elements of the partition that the part has."""
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
        """Return the parts of parameters in a rank's partition, in the order of their positions."""
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
        """Return all parameters as ranges of one partition, the whole flat buffer."""
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
        firsts: for each of them the first element of the flattened parameter, if some are tiles; None: all are 0.
    """
    slots = []
    offset = 0
    for (fqn, numel), first in zip(sizes, firsts or [0] * len(sizes), strict=True):
        slots.append(Slot(fqn=fqn, offset=offset, numel=numel, first=first))
        offset += round_up(numel, ELEMENT_ALIGNMENT)
    # A partition has at least ELEMENT_ALIGNMENT elements, because a unit may have only parameters without elements.
    partition_numel = max(round_up(offset, ELEMENT_ALIGNMENT * world_size) // world_size, ELEMENT_ALIGNMENT)
    if world_size > 1 and partition_numel >= PAGED_PARTITION:
        partition_numel = round_up(partition_numel, PAGE_ELEMENTS)
    return SlotTable(slots=tuple(slots), partition_numel=partition_numel, world_size=world_size)
