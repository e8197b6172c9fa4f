"""The layout of a flat buffer: where each parameter lies, and which chunk each rank owns. Pure functions of sizes.

[Note: flat groups] The parameters of a unit that share compute dtype and requires_grad lie in one flat buffer, each
starting at a multiple of 16 elements. The buffer is padded so that it divides into `world_size` chunks of equal size,
each a multiple of 16 elements; rank r owns elements [r * chunk, (r + 1) * chunk). An all-gather of the chunks therefore
*is* the flat buffer, and no copy-out follows. The 16 comes from torch's fused CPU AdamW, which rounds the last
`numel % 16` elements of a call differently: with every cut at a multiple of 16, any partition gives the same bits.
Large chunks are whole pages, so that each can be mapped to its place in the flat buffer (see flat_memory.py). That
takes at most 0.4 % of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paramserver.contract.limits import ELEMENT_ALIGNMENT

# PAGE_ELEMENTS fill whole pages of 4 KiB: one with 16-bit elements, two with 32-bit ones. A chunk of at least
# PAGED_CHUNK elements is rounded up to a multiple of PAGE_ELEMENTS.
PAGE_ELEMENTS = 2048
PAGED_CHUNK = 256 * PAGE_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of a whole parameter in the flat buffer, in elements."""

    fqn: str
    position: int
    numel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRange:
    """The part of a parameter that lies in one rank's chunk; all numbers are in elements.

    Attributes:
        slot: index of the parameter in FlatLayout.slots.
        fqn: name of the parameter.
        offset: first element of the part in the flattened parameter.
        numel: number of elements of the part.
        position: first element of the part in the chunk.
    """

    slot: int
    fqn: str
    offset: int
    numel: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """The layout of a flat buffer; see [Note: flat groups].

    Attributes:
        slots: the places of the parameters.
        chunk: number of elements that each rank owns.
        world_size: number of ranks.
    """

    slots: tuple[Slot, ...]
    chunk: int
    world_size: int

    @property
    def numel(self) -> int:
        """Number of elements of the flat buffer, with padding."""
        return self.chunk * self.world_size

    def chunk_range(self, rank: int) -> tuple[int, int]:
        """Return the [start, stop) of a rank's chunk in the flat buffer."""
        return rank * self.chunk, (rank + 1) * self.chunk

    def shards_of(self, rank: int) -> tuple[ShardRange, ...]:
        """Return the parts of parameters in a rank's chunk, in the order of their positions."""
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
        """Return all parameters as ranges whose positions are those in the flat buffer."""
        return tuple(
            ShardRange(slot=index, fqn=slot.fqn, offset=0, numel=slot.numel, position=slot.position)
            for index, slot in enumerate(self.slots)
            if slot.numel
        )


def flat_layout(sizes: Sequence[tuple[str, int]], world_size: int) -> FlatLayout:
    """Lay out parameters, given as (FQN, number of elements), one after the other; see [Note: flat groups]."""
    slots = []
    position = 0
    for fqn, numel in sizes:
        slots.append(Slot(fqn=fqn, position=position, numel=numel))
        position += round_up(numel, ELEMENT_ALIGNMENT)
    # A chunk has at least ELEMENT_ALIGNMENT elements, because a unit may have only parameters without elements.
    chunk = max(round_up(position, ELEMENT_ALIGNMENT * world_size) // world_size, ELEMENT_ALIGNMENT)
    if world_size > 1 and chunk >= PAGED_CHUNK:
        chunk = round_up(chunk, PAGE_ELEMENTS)
    return FlatLayout(slots=tuple(slots), chunk=chunk, world_size=world_size)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
