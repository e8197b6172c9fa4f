"""Where parameters lie in a flat buffer, and which part of it each rank owns. Pure functions of sizes.

[Note: flat groups] The parameters of a unit that share compute dtype and requires_grad lie in one flat buffer, each
starting at a multiple of 16 elements. The buffer is padded so that it divides into `world_size` chunks of equal size,
each a multiple of 16 elements; rank r owns elements [r * chunk, (r + 1) * chunk). An all-gather of the chunks therefore
*is* the flat buffer, and no copy-out follows. The 16 comes from torch's fused CPU AdamW, which rounds the last
`numel % 16` elements of a call differently: with every cut at a multiple of 16, any partition gives the same bits.
Large chunks are whole pages, so that each can be shown in its place of the flat buffer (see flat_memory.py): that is
0.4 % of padding at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.contract.limits import ELEMENT_ALIGNMENT

# A page of 4 KiB in 16 bits, two in 32; and the elements from which on a chunk consists of such.
PAGE_ELEMENTS = 2048
PAGED_CHUNK = 256 * PAGE_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a whole parameter lies in the flat buffer, in elements."""

    fqn: str
    position: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """The part of a parameter that lies in one rank's chunk, in elements."""

    slot: int  # index into FlatLayout.slots
    fqn: str
    offset: int  # into the flattened parameter
    numel: int
    position: int  # into the chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    slots: tuple[Slot, ...]
    chunk: int  # elements that a rank owns
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.chunk * self.world_size

    def chunk_range(self, rank: int) -> tuple[int, int]:
        """[start, stop) of a rank's chunk in the flat buffer."""
        return rank * self.chunk, (rank + 1) * self.chunk

    def shards_of(self, rank: int) -> tuple[ShardRange, ...]:
        """The parameter ranges in a rank's chunk, by position."""
        start, stop = self.chunk_range(rank)
        shards = []
        for index, slot in enumerate(self.slots):
            first = max(slot.position, start)
            last = min(slot.position + slot.numel, stop)
            if first < last:
                shards.append(
                    ShardRange(
                        slot=index,
                        fqn=slot.fqn,
                        offset=first - slot.position,
                        numel=last - first,
                        position=first - start,
                    )
                )
        return tuple(shards)

    def whole(self) -> tuple[ShardRange, ...]:
        """The parameters whole, by position in the flat buffer."""
        return tuple(
            ShardRange(slot=index, fqn=slot.fqn, offset=0, numel=slot.numel, position=slot.position)
            for index, slot in enumerate(self.slots)
            if slot.numel
        )


def flat_layout(sizes: Sequence[tuple[str, int]], world_size: int) -> FlatLayout:
    """Lays parameters, given as (FQN, elements), one after the other; see [Note: flat groups]."""
    slots = []
    position = 0
    for fqn, numel in sizes:
        slots.append(Slot(fqn=fqn, position=position, numel=numel))
        position += round_up(numel, ELEMENT_ALIGNMENT)
    # A chunk is never empty: parameters without elements are parameters, too.
    chunk = max(round_up(position, ELEMENT_ALIGNMENT * world_size) // world_size, ELEMENT_ALIGNMENT)
    if world_size > 1 and chunk >= PAGED_CHUNK:
        chunk = round_up(chunk, PAGE_ELEMENTS)
    return FlatLayout(slots=tuple(slots), chunk=chunk, world_size=world_size)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
