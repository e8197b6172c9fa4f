"""How the bytes of a slab hold its elements: as they are, or encoded in fewer bytes by a codec.

A client and an optimizer kernel always see elements. An encoded slab holds them in *records*: each record encodes the
same number of elements on its own, takes whole pages, and has one checksum. So a tile of an update reads, verifies and
writes whole records, and none of them is another tile's. A slab that is not encoded is plain: each element is a record
of its own, and a checksum covers a block of BLOCK_BYTES.

To add a codec, write a class that fulfils `Codec` and add an instance to CODECS.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from storage.base.errors import InvalidRequestError, NewerFormatError
from storage.base.integrity import BLOCK_BYTES
from storage.base.waiting import finish_all

# Tiles begin at multiples of this many elements. Elements of two bytes, the narrowest ones that a plain slab has, fill
# one checksum block, so the bytes of each tile can be verified without those of its neighbours.
TILE_QUANTUM = BLOCK_BYTES // 2
# The codec of plain slabs. The name is stored in the catalog.
PLAIN = ""
# Codecs encode elements of this type and decode to it, because all optimizer states have it.
_ITEMSIZE = torch.float32.itemsize


class Codec(Protocol):
    """The encoding of fp32 elements in records.

    Three things hold for each codec, and tests/unit/storage/test_codec.py checks them:

    - a record whose bytes are all zeros decodes to zeros, because a slab that was never written reads as zeros;
    - `encode` gives the same bytes for the elements that `decode` has returned, so that an export with an import, or a
      change of the number of ranks, changes no bit;
    - both are deterministic, so that a resumed run has the bits of a run that nothing has killed.

    Attributes:
        name: the name in the catalog and on the wire, which is never given to another encoding.
        record_elements: the elements of one record, a divisor of TILE_QUANTUM.
        record_bytes: the bytes of one record: whole pages, and at most four for each element.
    """

    name: str
    record_elements: int
    record_bytes: int

    def decode(self, records: torch.Tensor, elements: torch.Tensor) -> None:
        """Write the elements of records.

        Args:
            records: uint8, of shape (n, record_bytes).
            elements: fp32, of shape (n, record_elements), which is written to.
        """
        ...

    def encode(self, elements: torch.Tensor, records: torch.Tensor) -> None:
        """Write the records of elements; the arguments are those of `decode`, and `records` is written to."""
        ...


# The codecs by name.
CODECS: dict[str, Codec] = {}


def codec_named(name: str) -> Codec:
    """Return a codec.

    Raises:
        NewerFormatError: there is no codec of this name.
    """
    if name not in CODECS:
        raise NewerFormatError(
            f"written by a newer release, or asked for by one: codec {name!r}. This release has "
            f"{', '.join(sorted(CODECS)) or 'none'}; use the one that wrote it"
        )
    return CODECS[name]


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """How a slab of `numel` elements lies in its bytes.

    Attributes:
        numel: the number of elements.
        itemsize: the bytes of an element as clients and kernels see it.
        codec: the codec of an encoded slab; None for a plain one.
        record_elements, record_bytes: the size of a record.
        block_bytes: the bytes that one checksum covers.
    """

    numel: int
    itemsize: int
    codec: Codec | None
    record_elements: int
    record_bytes: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        """The size of one version of the slab in bytes, without padding to pages."""
        return -(-self.numel // self.record_elements) * self.record_bytes

    @property
    def element_bytes(self) -> int:
        """The size of all elements in bytes, as clients see them."""
        return self.numel * self.itemsize

    def bytes_of(self, first: int, end: int) -> slice:
        """Return the bytes of the slab that hold elements `[first, end)`, in whole records."""
        start, stop = first // self.record_elements, -(-end // self.record_elements)
        return slice(start * self.record_bytes, stop * self.record_bytes)

    def elements_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of elements that have a part in the bytes `[start, stop)` of the slab."""
        first, end = start // self.record_bytes, -(-stop // self.record_bytes)
        return first * self.record_elements, min(end * self.record_elements, self.numel)

    def decode(self, records: memoryview, elements: torch.Tensor) -> None:
        """Write the elements of an encoded slab's records. `elements` is fp32, and may end within the last record."""
        assert self.codec is not None
        stored = torch.frombuffer(records, dtype=torch.uint8).view(-1, self.record_bytes)
        whole = elements.numel() // self.record_elements
        if whole:
            self.codec.decode(stored[:whole], elements[: whole * self.record_elements].view(whole, -1))
        if whole < len(stored):
            last = torch.empty((1, self.record_elements))
            self.codec.decode(stored[whole:], last)
            elements[whole * self.record_elements :] = last[0, : elements.numel() % self.record_elements]

    def encode(self, elements: torch.Tensor, records: memoryview) -> None:
        """Write the records of an encoded slab. Where `elements` ends within the last one, the rest of it is zeros."""
        assert self.codec is not None
        stored = torch.frombuffer(records, dtype=torch.uint8).view(-1, self.record_bytes)
        whole = elements.numel() // self.record_elements
        if whole:
            self.codec.encode(elements[: whole * self.record_elements].view(whole, -1), stored[:whole])
        if whole < len(stored):
            last = torch.zeros((1, self.record_elements))
            last[0, : elements.numel() % self.record_elements] = elements[whole * self.record_elements :]
            self.codec.encode(last, stored[whole:])


async def decode(layout: SlabLayout, records: memoryview, elements: torch.Tensor) -> None:
    """Do `layout.decode` on a thread.

    If the caller is cancelled, this ends only when the thread has left the memory, so that the caller may free it.
    """
    await finish_all([asyncio.ensure_future(asyncio.to_thread(layout.decode, records, elements))])


async def encode(layout: SlabLayout, elements: torch.Tensor, records: memoryview) -> None:
    """Do `layout.encode` on a thread; see `decode`."""
    await finish_all([asyncio.ensure_future(asyncio.to_thread(layout.encode, elements, records))])


@functools.lru_cache(maxsize=4096)
def layout_of(codec_name: str, numel: int, itemsize: int) -> SlabLayout:
    """Return the layout of a slab.

    Args:
        codec_name: the codec's name, or PLAIN.
        numel: the number of elements.
        itemsize: the bytes of an element.

    Raises:
        NewerFormatError: there is no codec of this name.
        InvalidRequestError: the elements of an encoded slab are not fp32.
    """
    if codec_name == PLAIN:
        return SlabLayout(numel, itemsize, None, 1, itemsize, BLOCK_BYTES)
    codec = codec_named(codec_name)
    if itemsize != _ITEMSIZE:
        raise InvalidRequestError(f"codec {codec_name!r} encodes float32, and no elements of {itemsize} bytes")
    return SlabLayout(numel, itemsize, codec, codec.record_elements, codec.record_bytes, codec.record_bytes)
