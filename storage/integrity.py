"""Checksums of what is on NVMe: a flipped bit, a torn write, a misdirected or stale block is found before it is used.

Every region carries one checksum per block, seeded with a fingerprint of what the block is (slab, version, place), so
that good bytes at the wrong place, or of another version, are as wrong as damaged ones. The catalog keeps the
checksums: they become valid in the transaction that commits the version.
"""

from __future__ import annotations

from array import array

import xxhash

from storage.errors import DamagedBlockError, DataLossError

# The unit of verification, and so of reads. Larger ones are not faster: XXH3-64 runs at its full speed, without the
# interpreter's lock from 100,000 bytes on, and the loop over blocks costs little beside it.
BLOCK_BYTES = 128 << 10
# In regions that were written before format 4.
OLD_BLOCK_BYTES = 16 << 10

_xxh3 = xxhash.xxh3_64_intdigest
_SEED_MASK = (1 << 64) - 1


class Checksums:
    """One checksum per block of a region of `nbytes`; the last block may be short.

    Attributes:
        label: says whose bytes they are: it is part of the checksum, and of the error when it does not match.
        block_bytes: BLOCK_BYTES, or less in older regions.
    """

    __slots__ = ("_fingerprint", "block_bytes", "label", "nbytes", "values")

    def __init__(self, label: str, nbytes: int, stored: bytes | None = None) -> None:
        """`stored` is what `dump` gave. Raises DataLossError if it does not fit the region."""
        self.label = label
        self.nbytes = nbytes
        self.block_bytes = BLOCK_BYTES
        if stored is not None and len(stored) // 8 != -(-nbytes // BLOCK_BYTES):
            self.block_bytes = OLD_BLOCK_BYTES
        count = -(-nbytes // self.block_bytes)
        self.values = array("Q", bytes(8 * count) if stored is None else stored)
        if len(self.values) != count:
            raise DataLossError(f"the catalog has {len(self.values)} checksums for the {nbytes} bytes of {label}")
        self._fingerprint = xxhash.xxh3_64_intdigest(label.encode())

    def record(self, offset: int, buffer: memoryview) -> None:
        """Takes the checksums of bytes that are about to be written at `offset`."""
        values, size = self.values, self.block_bytes
        for i, start in enumerate(range(0, len(buffer), size), self._first_block(offset, len(buffer))):
            values[i] = _xxh3(buffer[start : start + size], self._fingerprint + i & _SEED_MASK)

    def verify(self, offset: int, buffer: memoryview) -> None:
        """Checks bytes that were read at `offset`.

        Raises:
            DamagedBlockError: they are not the bytes that were written.
        """
        values, size = self.values, self.block_bytes
        for i, start in enumerate(range(0, len(buffer), size), self._first_block(offset, len(buffer))):
            if values[i] != _xxh3(buffer[start : start + size], self._fingerprint + i & _SEED_MASK):
                raise DamagedBlockError(self.label, offset + start, min(size, len(buffer) - start))

    def dump(self) -> bytes:
        """What the catalog stores."""
        return self.values.tobytes()

    def _first_block(self, offset: int, length: int) -> int:
        end, size = offset + length, self.block_bytes
        if offset % size or (end % size and end != self.nbytes) or end > self.nbytes:
            raise ValueError(f"bytes [{offset}, {end}) of {self.label} are not whole blocks of its {self.nbytes} bytes")
        return offset // size
