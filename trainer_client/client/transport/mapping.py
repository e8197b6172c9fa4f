"""mmap calls at a fixed address, which Python's `mmap` module does not offer.

With them, an address range that tensors view can be switched to other memory while the tensors stay the same objects. A
caller must never pass a range that it has not mapped itself, because the kernel discards the former mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# Flags of mmap and madvise in Linux that Python's mmap module lacks. The values are the same on all processors that
# torch is built for.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_HUGE_PAGE_BYTES = 2 << 20
_MADV_DONTNEED = 4

# Linux shows in this file 8 bytes for each page of this process. Bit 63 or 62 is set if the page is in memory or
# swapped out. Bit 61 is set if the page belongs to a file or to shared memory, and not to a copy of this process.
_PAGE_MAP = Path("/proc/self/pagemap")
_ENTRY_BYTES = 8
_IS_THERE, _IS_OF_FILE = -(1 << 62), 1 << 61

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """A range of a file that `map_file_at` can map into memory.

    Attributes:
        descriptor: file descriptor. It stays open as long as the range may be mapped; an existing mapping does not
            need it.
        offset: first byte of the range in the file.
    """

    descriptor: int
    offset: int


def map_file(descriptor: int, nbytes: int, *, is_private: bool = False) -> memoryview:
    """Map the first `nbytes` of a file, and return a view of them, which other processes may map, too.

    Writes go to the file, unless `is_private`: then a write copies its page into this process, see `map_file_at`.

    The mapping lasts as long as the view or a slice of it is referenced. It begins at a multiple of _HUGE_PAGE_BYTES,
    because the processor can use a huge page only there; storage/base/syscalls.py has the measured gain.

    Raises:
        OSError: the kernel refuses.
        ValueError: the file is shorter.
    """
    if (there := os.fstat(descriptor).st_size) < nbytes:
        raise ValueError(f"the file has {there} bytes, and {nbytes} are to be mapped")
    reserved = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    lead = -begin % _HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if is_private else mmap.MAP_SHARED
    _map(begin + lead, nbytes, flags | _MAP_FIXED, descriptor, 0)
    return memoryview(reserved)[lead : lead + nbytes]


def map_file_at(address: int, nbytes: int, source: FileRange) -> None:
    """Map a file range at `address`, in place of the former mapping, without copying bytes.

    The mapping is copy-on-write: a write copies the page into this process and does not change the file. A page that
    this process has not written to follows changes of the file. `address` and `source.offset` are multiples of the
    page size; if `nbytes` is not, its last page is mapped whole.

    Raises:
        OSError: the kernel refuses; the former mapping is unchanged.
    """
    # MAP_POPULATE is not passed to mmap, because it would copy each page of a writable private mapping at once.
    _map(address, nbytes, mmap.MAP_PRIVATE | _MAP_FIXED, source.descriptor, source.offset)


def show_file_again(view: memoryview) -> None:
    """Discard what this process has written to whole pages of a private mapping, so that they show the file again.

    Raises:
        OSError: the kernel refuses.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if _libc.madvise(address, len(view), _MADV_DONTNEED) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"madvise of {len(view)} bytes: {os.strerror(error)}")


def written_ranges(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a mapping of `map_file_at` that this process may have written to, as [begin, end) in bytes.

    The parts are whole pages. If the kernel does not tell which pages were written to, the one part is the whole
    mapping.
    """
    try:
        with _PAGE_MAP.open("rb", buffering=0) as page_map:
            content = os.pread(
                page_map.fileno(),
                -(-nbytes // mmap.PAGESIZE) * _ENTRY_BYTES,
                address // mmap.PAGESIZE * _ENTRY_BYTES,
            )
    except OSError:
        content = b""
    if len(content) * mmap.PAGESIZE < nbytes * _ENTRY_BYTES:
        yield 0, nbytes
        return
    entries = torch.frombuffer(bytearray(content), dtype=torch.int64)
    pages = ((entries & _IS_THERE) != 0) & ((entries & _IS_OF_FILE) == 0)
    if not pages.any():
        return
    numbers = pages.nonzero().flatten()
    ends = torch.cat([numbers.diff() != 1, torch.tensor([True])])
    begins = torch.cat([torch.tensor([True]), ends[:-1]])
    for first, last in zip(numbers[begins].tolist(), numbers[ends].tolist(), strict=True):
        yield first * mmap.PAGESIZE, min((last + 1) * mmap.PAGESIZE, nbytes)


def map_zeros_at(address: int, nbytes: int) -> None:
    """Map private zeroed memory at `address`, in place of the former mapping. A page takes no memory until it is used.

    Raises:
        OSError: the kernel refuses; the former mapping is unchanged.
    """
    _map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)


def _map(address: int, nbytes: int, flags: int, descriptor: int, offset: int) -> None:
    if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset) != address:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {nbytes} bytes: {os.strerror(error)}")
