"""Checksums of the bytes on NVMe, which find a flipped bit, a torn write, or a misdirected or stale block before use.

Every region has one checksum per block. The seed of a checksum is a fingerprint of the block's slab, version and index,
so that intact bytes in the wrong place, or of another version, do not match either. The catalog keeps the checksums,
and they become valid in the transaction that commits the version.
"""

from __future__ import annotations

from array import array

import xxhash

from storage.base.errors import DamagedBlockError, FormerFormatError

# The bytes of a plain slab that one checksum covers, and so the least that a verified read fetches. They are above the
# 100,000 bytes from which on XXH3-64 runs without the interpreter's lock. Larger blocks would not be faster, because
# XXH3-64 runs at full speed, and the loop over blocks is cheap.
BLOCK_BYTES = 128 << 10

_xxh3 = xxhash.xxh3_64_intdigest
_SEED_MASK = (1 << 64) - 1


class Checksums:
    """The checksums of a region of `nbytes`, one for each block. The last block may be short.

    Attributes:
        label: the name of the region's slab and version. It is a part of each checksum, and errors name it.
    """

    __slots__ = ("_fingerprint", "block_bytes", "label", "nbytes", "values")

    def __init__(self, label: str, nbytes: int, block_bytes: int = BLOCK_BYTES, stored: bytes | None = None) -> None:
        """Make checksums to be recorded, or load the ones that `dump` returned (`stored`).

        Args:
            label: see above.
            nbytes: the size of the region.
            block_bytes: the bytes that one checksum covers, a record of an encoded slab; see codec.py.
            stored: the checksums, if they are known.

        Raises:
            FormerFormatError: the region has smaller blocks, as regions have that were written before format 4.
        """
        self.label = label
        self.nbytes = nbytes
        self.block_bytes = block_bytes
        count = -(-nbytes // block_bytes)
        self.values = array("Q", bytes(8 * count) if stored is None else stored)
        if len(self.values) != count:
            # The number of checksums cannot be wrong by damage, because the catalog's digests cover the checksums. So a
            # wrong number means that an earlier format wrote the region.
            name = label.replace("\n", ", layout ")
            raise FormerFormatError(f"{name} has {len(self.values)} checksums for {nbytes} bytes, and not {count}")
        self._fingerprint = xxhash.xxh3_64_intdigest(label.encode())

    def record(self, offset: int, buffer: memoryview) -> None:
        """Compute and keep the checksums of bytes that are about to be written at byte `offset` of the region."""
        values, size = self.values, self.block_bytes
        for i, start in enumerate(range(0, len(buffer), size), self._first_block(offset, len(buffer))):
            values[i] = _xxh3(buffer[start : start + size], self._fingerprint + i & _SEED_MASK)

    def verify(self, offset: int, buffer: memoryview) -> None:
        """Check bytes that were read at byte `offset` of the region.

        Raises:
            DamagedBlockError: they are not the bytes that were recorded.
        """
        values, size = self.values, self.block_bytes
        for i, start in enumerate(range(0, len(buffer), size), self._first_block(offset, len(buffer))):
            if values[i] != _xxh3(buffer[start : start + size], self._fingerprint + i & _SEED_MASK):
                raise DamagedBlockError(self.label, offset + start, min(size, len(buffer) - start))

    def dump(self) -> bytes:
        """Return the checksums as the catalog stores them: 8 bytes each."""
        return self.values.tobytes()

    def _first_block(self, offset: int, length: int) -> int:
        end, size = offset + length, self.block_bytes
        if offset % size or (end % size and end != self.nbytes) or end > self.nbytes:
            raise ValueError(f"bytes [{offset}, {end}) of {self.label} are not whole blocks of its {self.nbytes} bytes")
        return offset // size
