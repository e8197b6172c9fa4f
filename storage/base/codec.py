"""How the bytes of a slab hold its elements: as they are, or encoded in fewer bytes by a codec.

A client and an optimizer kernel always see elements. An encoded slab holds them in *records*: each record encodes the
same number of elements on its own, takes whole pages, and has one checksum. So a tile of an update reads, verifies and
writes whole records, and none of them is another tile's. A slab that is not encoded is plain: each element is a record
of its own, and a checksum covers a block of BLOCK_BYTES.

To add a codec, write a class that fulfils `Codec` and add an instance to CODECS.

A slab may have several codecs, each for a *range* of elements, for example to keep the states of the embeddings as they
are, or to keep nothing for parameters whose optimizer does not use the state. The name of such a slab's codec is the
table of its ranges: "plain@0,absent@131072" has 131,072 elements as they are, and no bytes for those behind them.
"""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
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
# The bytes that one checksum covers in a slab with a table of ranges. Records of different codecs have different sizes,
# and all of them are whole pages.
_RANGES_BLOCK_BYTES = 4096
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
        record_bytes: the bytes of one record: whole pages, and at most four for each element. 0 if the codec keeps
            nothing.
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


class PlainCodec:
    """The elements as they are, for ranges of slabs that have other codecs, too. A record is one page."""

    name = "plain"
    record_elements = 1024
    record_bytes = 4096

    def decode(self, records: torch.Tensor, elements: torch.Tensor) -> None:
        """See `Codec.decode`."""
        elements.copy_(records.view(torch.float32))

    def encode(self, elements: torch.Tensor, records: torch.Tensor) -> None:
        """See `Codec.encode`."""
        records.view(torch.float32).copy_(elements)


class AbsentCodec:
    """No bytes: the elements are zeros, for ranges of parameters whose optimizer does not use the state."""

    name = "absent"
    record_elements = 16
    record_bytes = 0

    def decode(self, records: torch.Tensor, elements: torch.Tensor) -> None:
        """See `Codec.decode`."""
        elements.zero_()

    def encode(self, elements: torch.Tensor, records: torch.Tensor) -> None:
        """See `Codec.encode`.

        Raises:
            InvalidRequestError: an element is not zero, and would be lost.
        """
        if elements.any():
            raise InvalidRequestError(f"a range with codec {self.name!r} keeps no bytes, so its elements must be zeros")


# The codecs by name.
CODECS: dict[str, Codec] = {codec.name: codec for codec in (PlainCodec(), AbsentCodec())}


def codecs_named(name: str) -> list[tuple[int, Codec]]:
    """Return the codecs of a slab with the first element of each one's range, for a name that is not PLAIN.

    Raises:
        NewerFormatError: there is no codec of this name, or the table of ranges cannot be read.
    """
    table = [part.partition("@") for part in name.split(",")]
    firsts = [first for _, _, first in table] if "@" in name else ["0"]
    unknown = [codec for codec, _, _ in table if codec not in CODECS]
    if unknown or not all(first.isdecimal() for first in firsts):
        raise NewerFormatError(
            f"written by a newer release, or asked for by one: codec {(unknown or [name])[0]!r}. This release has "
            f"{', '.join(sorted(CODECS))}; use the one that wrote it"
        )
    return [(int(first), CODECS[codec]) for first, (codec, _, _) in zip(firsts, table, strict=True)]


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """How a slab of `numel` elements lies in its bytes. This class is the layout of a plain slab.

    Attributes:
        numel: the number of elements.
        itemsize: the bytes of an element as clients and kernels see it.
        block_bytes: the bytes that one checksum covers.
    """

    numel: int
    itemsize: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        """The size of one version of the slab in bytes, without padding to pages."""
        return self.element_bytes

    @property
    def element_bytes(self) -> int:
        """The size of all elements in bytes, as clients see them."""
        return self.numel * self.itemsize

    def bytes_of(self, first: int, end: int) -> slice:
        """Return the bytes of the slab that hold elements `[first, end)`, in whole records."""
        return slice(first * self.itemsize, end * self.itemsize)

    def elements_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of elements that have a part in the bytes `[start, stop)` of the slab."""
        return start // self.itemsize, min(-(-stop // self.itemsize), self.numel)

    def keeps(self, first: int, end: int) -> bool:
        """Return whether each of the elements `[first, end)` has bytes, so that it can have a value besides zero."""
        return True


@dataclass(frozen=True, slots=True)
class _Range:
    """Elements `[first, end)` of a slab in records of one codec, which begin at byte `start` of the slab."""

    first: int
    end: int
    start: int
    codec: Codec

    @property
    def stop(self) -> int:
        """The end of the last record in the slab's bytes."""
        return self.byte_of(self.end + self.codec.record_elements - 1)

    def byte_of(self, element: int) -> int:
        """Return the first byte of the record that has an element."""
        return self.start + (element - self.first) // self.codec.record_elements * self.codec.record_bytes

    def decode(self, records: torch.Tensor, elements: torch.Tensor) -> None:
        """Write the elements of records. `elements` may end within the last one."""
        stored, whole, rest = self._split(records, elements)
        if len(whole):
            self.codec.decode(stored[: len(whole)], whole)
        if len(rest):
            last = torch.empty((1, self.codec.record_elements))
            self.codec.decode(stored[len(whole) :], last)
            rest.copy_(last[0, : len(rest)])

    def encode(self, elements: torch.Tensor, records: torch.Tensor) -> None:
        """Write the records of elements. Where `elements` ends within the last one, the rest of it is zeros."""
        stored, whole, rest = self._split(records, elements)
        if len(whole):
            self.codec.encode(whole, stored[: len(whole)])
        if len(rest):
            last = torch.zeros((1, self.codec.record_elements))
            last[0, : len(rest)] = rest
            self.codec.encode(last, stored[len(whole) :])

    def _split(self, records: torch.Tensor, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the records in rows, the elements of the whole ones in rows, and those of the last if it is not."""
        size = self.codec.record_elements
        whole = len(elements) // size
        stored = records.view(-(-len(elements) // size), self.codec.record_bytes)
        return stored, elements[: whole * size].view(whole, size), elements[whole * size :]


@dataclass(frozen=True, slots=True)
class EncodedLayout(SlabLayout):
    """The layout of a slab whose fp32 elements are in records; `ranges` says of which codec, in ascending order."""

    ranges: tuple[_Range, ...]

    @property
    def nbytes(self) -> int:
        """See `SlabLayout.nbytes`."""
        return self.ranges[-1].stop

    def bytes_of(self, first: int, end: int) -> slice:
        """See `SlabLayout.bytes_of`."""
        last = self._range_of(end - 1) if end > first else None
        start = self._range_of(first).byte_of(first)
        return slice(start, start if last is None else last.byte_of(end - 1 + last.codec.record_elements))

    def elements_of(self, start: int, stop: int) -> tuple[int, int]:
        """See `SlabLayout.elements_of`."""
        touched = [one for one in self.ranges if one.start < stop and start < one.stop]
        if not touched:
            return 0, 0
        first, last = touched[0], touched[-1]
        before = max(0, start - first.start) // first.codec.record_bytes
        records = -(-(min(stop, last.stop) - last.start) // last.codec.record_bytes)
        end = min(last.first + records * last.codec.record_elements, last.end)
        return first.first + before * first.codec.record_elements, end

    def keeps(self, first: int, end: int) -> bool:
        """See `SlabLayout.keeps`."""
        return all(one.codec.record_bytes for one, _, _ in self._cut(first, end))

    def records_within(self, first: int, end: int, most_bytes: int) -> tuple[int, int]:
        """Return the elements of the records from that of element `first` on which hold elements before `end`.

        They are as many whole records as `most_bytes` have room for.
        """
        at = self._range_of(first)
        begin = stop = first - (first - at.first) % at.codec.record_elements
        for one, start, last in self._cut(begin, end):
            size = one.codec.record_elements
            count = -(-(last - start) // size)
            if one.codec.record_bytes:
                count = min(count, most_bytes // one.codec.record_bytes)
            most_bytes -= count * one.codec.record_bytes
            stop = min(start + count * size, one.end)
            if stop < last:
                break
        return begin, stop

    def decode(self, records: memoryview, first: int, elements: torch.Tensor) -> None:
        """Write elements from their records.

        Args:
            records: the bytes of the records that hold the elements.
            first: the first of the elements, which begins a record.
            elements: fp32, which is written to; may end within the last record.
        """
        for one, stored, part in self._pieces(records, first, elements):
            one.decode(stored, part)

    def encode(self, elements: torch.Tensor, first: int, records: memoryview) -> None:
        """Write the records of elements; the arguments are those of `decode`, and `records` is written to."""
        for one, stored, part in self._pieces(records, first, elements):
            one.encode(part, stored)

    def _pieces(
        self, records: memoryview, first: int, elements: torch.Tensor
    ) -> Iterator[tuple[_Range, torch.Tensor, torch.Tensor]]:
        """Yield each range that has some of the elements, which begin at `first`, with its records and its elements."""
        # torch makes no tensor of an empty buffer, which is all that absent elements have.
        stored = torch.frombuffer(records, dtype=torch.uint8) if records else torch.empty(0, dtype=torch.uint8)
        begin = self.bytes_of(first, first).start
        for one, start, end in self._cut(first, first + len(elements)):
            span = self.bytes_of(start, end)
            yield one, stored[span.start - begin : span.stop - begin], elements[start - first : end - first]

    def _range_of(self, element: int) -> _Range:
        return self.ranges[bisect_right(self.ranges, element, key=attrgetter("first")) - 1]

    def _cut(self, first: int, end: int) -> Iterator[tuple[_Range, int, int]]:
        """Yield each range that has some of the elements `[first, end)`, with the first and the end of these."""
        for one in self.ranges:
            if one.first < end and first < one.end:
                yield one, max(first, one.first), min(end, one.end)


async def decode(layout: EncodedLayout, records: memoryview, first: int, elements: torch.Tensor) -> None:
    """Do `layout.decode` on a thread.

    If the caller is cancelled, this ends only when the thread has left the memory, so that the caller may free it.
    """
    await finish_all([asyncio.ensure_future(asyncio.to_thread(layout.decode, records, first, elements))])


async def encode(layout: EncodedLayout, elements: torch.Tensor, first: int, records: memoryview) -> None:
    """Do `layout.encode` on a thread; see `decode`."""
    await finish_all([asyncio.ensure_future(asyncio.to_thread(layout.encode, elements, first, records))])


@functools.lru_cache(maxsize=4096)
def layout_of(codec_name: str, numel: int, itemsize: int) -> SlabLayout:
    """Return the layout of a slab.

    Args:
        codec_name: the codec's name, the table of the ranges, or PLAIN.
        numel: the number of elements.
        itemsize: the bytes of an element.

    Raises:
        NewerFormatError: there is no codec of this name.
        InvalidRequestError: the elements of an encoded slab are not fp32, or the ranges do not fit the slab.
    """
    if codec_name == PLAIN:
        return SlabLayout(numel, itemsize, BLOCK_BYTES)
    codecs = codecs_named(codec_name)
    if itemsize != _ITEMSIZE:
        raise InvalidRequestError(f"codec {codec_name!r} encodes float32, and no elements of {itemsize} bytes")
    ranges: list[_Range] = []
    at = start = 0
    for (first, codec), (end, _) in zip(codecs, [*codecs[1:], (numel, None)], strict=True):
        # Only the last record of a slab may be partly filled, so that no tile has more than four bytes for an element.
        is_filled = end == numel or end % codec.record_elements == 0
        if first != at or first >= end or first % codec.record_elements or not is_filled:
            raise InvalidRequestError(
                f"codec {codec_name!r} of {numel} elements: the first range must begin with element 0, each must have "
                f"elements, and {codec.name!r} needs ranges that begin and end at multiples of {codec.record_elements}"
            )
        ranges.append(_Range(first, end, start, codec))
        at, start = end, ranges[-1].stop
    if not start:
        raise InvalidRequestError(f"codec {codec_name!r} keeps no element of the slab; leave out its kind instead")
    block_bytes = _RANGES_BLOCK_BYTES if "@" in codec_name else ranges[0].codec.record_bytes
    return EncodedLayout(numel, itemsize, block_bytes, tuple(ranges))
