"""The directory of one loan: which bytes of which versions lie where in the memory of one lender.

This module owns the borrower's record of a loan. It must never touch a byte of the loan, nor call a lender.

[Note: one room for the versions of a slab] The room of a slab is the range of the loan that has the copies of the
slab's versions. An update writes the new version of a slab into the room of the old one, tile by tile, right after it
has read the same tile of the old version. So a slab takes its size once, although two of its versions are alive until
the step is committed. Each checksum block of the room has an owner: the version whose bytes it has. Blocks that a
version does not own any more are read from NVMe, for example after a roll-back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from storage.tiers.block_macs import SEAL_BYTES
from storage.tiers.contract import Region
from storage.tiers.free_runs import FreeRuns
from storage.tiers.giving_way import giving_way

# Each block of a loan has the number of the version that owns it. The versions of a slab are numbered from 1 to this,
# and then from 1 again. A block without an owner has 0.
_MOST_OWNERS = 255


@dataclass(slots=True, eq=False)
class RemoteCopy:
    """The range of a loan that has the copies of one slab's versions, and the version that owns each of its blocks.

    Attributes:
        offset, room_bytes: the first byte of the range in the loan, and its length.
        block_bytes: the bytes that one checksum of the versions covers.
        next_use: the trace position at which the bytes are needed next.
        newest: the number of the version that was begun last.
        is_dropped: whether the range was freed, so that it may be another slab's by now.
    """

    offset: int
    room_bytes: int
    block_bytes: int
    next_use: float
    newest: int = 0
    is_dropped: bool = False
    _number_of: dict[Region, int] = field(default_factory=dict)
    _owners: bytearray = field(default_factory=bytearray)
    # A nonce and a MAC for each checksum block of the range, as `BlockMacs.seal` makes them. The MAC of a block that
    # no version owns is not valid, so such a block is never read from the lender.
    _seals: bytearray = field(default_factory=bytearray)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The versions that may own blocks of the range: those that were begun and not forgotten."""
        return tuple(self._number_of)

    def fits(self, region: Region) -> bool:
        """Return whether a version has the size of the range, and its blocks."""
        return self.room_bytes == region.nbytes and self.block_bytes == region.block_bytes

    def begin(self, region: Region) -> None:
        """Register a version as the newest one of the slab, before its bytes are sent. It owns no block yet."""
        self.newest = self.newest % _MOST_OWNERS + 1
        self._number_of[region] = self.newest

    def is_newest(self, region: Region) -> bool:
        """Return whether a version is the one that was begun last, and so the only one whose bytes may be sent."""
        return self._number_of.get(region) == self.newest

    def forget(self, region: Region) -> None:
        """Leave the blocks that a version owns without an owner, so that reads of the version go to NVMe."""
        number = self._number_of.pop(region, None)
        if number is not None:
            self._owners = self._owners.replace(bytes((number,)), b"\0")

    def owns(self, region: Region, offset: int, nbytes: int) -> bool:
        """Return whether a version owns all blocks that have its bytes [offset, offset + nbytes)."""
        number = self._number_of.get(region)
        first, end = offset // self.block_bytes, -(-(offset + nbytes) // self.block_bytes)
        return number is not None and self._owners.count(number, first, end) == end - first

    def take(self, offset: int, nbytes: int) -> None:
        """Leave whole blocks without an owner, because other bytes are about to be written to them."""
        first, end = offset // self.block_bytes, -(-(offset + nbytes) // self.block_bytes)
        self._owners[first:end] = bytes(end - first)

    def put_seals(self, offset: int, seals: bytes) -> None:
        """Keep the nonces and MACs (`BlockMacs.seal`) of whole blocks from byte `offset` on, which will be sent."""
        start = offset // self.block_bytes * SEAL_BYTES
        self._seals[start : start + len(seals)] = seals

    def seals_of(self, offset: int, nbytes: int) -> memoryview:
        """Return the nonces and MACs of the whole blocks that have bytes `[offset, offset + nbytes)` of the range."""
        first, end = offset // self.block_bytes, -(-(offset + nbytes) // self.block_bytes)
        return memoryview(self._seals[first * SEAL_BYTES : end * SEAL_BYTES])

    def give(self, number: int, offset: int, nbytes: int) -> None:
        """Make the version with this number the owner of whole blocks, unless a newer version has begun meanwhile."""
        first, end = offset // self.block_bytes, -(-(offset + nbytes) // self.block_bytes)
        if number == self.newest:
            self._owners[first:end] = bytes((number,)) * (end - first)


class LoanDirectory:
    """The directory of one loan: it allocates a range of the loan to each slab whose bytes the lender keeps.

    The remote tier has one for each lender.

    Attributes:
        size_bytes: the size of the loan.
        used_bytes: the bytes of all allocated ranges.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.used_bytes = 0
        self._free = FreeRuns()
        self._copies: dict[RemoteCopy, None] = {}

    @property
    def copies(self) -> tuple[RemoteCopy, ...]:
        """The ranges of all slabs that have one in the loan."""
        return tuple(self._copies)

    def resize(self, size_bytes: int) -> list[RemoteCopy]:
        """Set the size of the loan. Drop the copies that do not lie within the new size, and return them."""
        dropped = [copy for copy in self._copies if copy.offset + copy.room_bytes > size_bytes]
        for copy in dropped:
            self.drop(copy)
        self.size_bytes = size_bytes
        self._free = FreeRuns()
        free_from = 0
        for copy in sorted(self._copies, key=lambda copy: copy.offset):
            if free_from < copy.offset:
                self._free.add(free_from, copy.offset)
            free_from = copy.offset + copy.room_bytes
        if free_from < size_bytes:
            self._free.add(free_from, size_bytes)
        return dropped

    def place(self, nbytes: int, block_bytes: int, next_use: float) -> tuple[RemoteCopy | None, list[RemoteCopy]]:
        """Allocate a range for a slab. Return it, or None if there is no room, and the copies that were dropped for it.

        Copies are dropped only if their next use is farther away than `next_use`. Copies without a next use, such as
        optimizer states, which each update needs once, do not give way to each other: the same ones stay, so each step
        finds them.
        """
        if not nbytes:
            return None, []
        dropped: list[RemoteCopy] = []
        index = self._free.lowest_fit(nbytes)
        if index is None and nbytes <= self.size_bytes:
            later = [copy for copy in self._copies if copy.next_use > next_use]
            later.sort(key=lambda copy: copy.next_use, reverse=True)
            dropped = list(giving_way(self._free, nbytes, later))
            for copy in dropped:
                self.drop(copy)
            index = self._free.lowest_fit(nbytes)
        if index is None:
            return None, dropped
        copy = RemoteCopy(self._free.cut(index, nbytes), nbytes, block_bytes, next_use)
        blocks = -(-nbytes // block_bytes)
        copy._owners, copy._seals = bytearray(blocks), bytearray(blocks * SEAL_BYTES)
        self._copies[copy] = None
        self.used_bytes += nbytes
        return copy, dropped

    def drop(self, copy: RemoteCopy) -> None:
        """Forget the copy of a slab, and free its range of the loan."""
        copy.is_dropped = True
        del self._copies[copy]
        self.used_bytes -= copy.room_bytes
        self._free.add(copy.offset, copy.offset + copy.room_bytes)
