"""Which memory an address range of this process shows: the one place that asks the kernel for it by address.

Python's `mmap` cannot put a mapping where another one is, which is what keeps tensors that view the range what they
are. Must never be given a range that is not wholly the caller's own mapping: what was there is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

# Of Linux on all processors that torch is built for; Python's mmap module does not name them.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_HUGE_PAGE_BYTES = 2 << 20

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Bytes of a file that can be mapped, from `offset` on.

    Attributes:
        descriptor: open as long as the range may be mapped; a mapping does not need it any more.
    """

    descriptor: int
    offset: int


def map_file(descriptor: int, nbytes: int) -> memoryview:
    """The first bytes of a file, shared with whoever has mapped it; mapped as long as somebody has a view of them.

    At a multiple of _HUGE_PAGE_BYTES: only there the processor sees a huge page as one (storage/syscalls.py has what
    that is worth).

    Raises:
        OSError: the kernel refuses.
        ValueError: the file is shorter.
    """
    if (there := os.fstat(descriptor).st_size) < nbytes:
        raise ValueError(f"the file has {there} bytes, and {nbytes} are to be mapped")
    reserved = mmap.mmap(-1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    lead = -begin % _HUGE_PAGE_BYTES
    _map(begin + lead, nbytes, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    return memoryview(reserved)[lead : lead + nbytes]


def show_file(address: int, nbytes: int, source: FileRange) -> None:
    """Shows a file's bytes at `address`, instead of what was there, without copying them.

    What is written there stays in this process, a page at a time: the file is not changed. Pages that were not written
    to show what others write to the file. All three numbers are multiples of the page size, but for `nbytes`, whose
    last page is shown whole.

    Raises:
        OSError: the kernel refuses; what was there is still there.
    """
    # Not prefaulted: of a private mapping that may be written, that would be a copy of each page.
    _map(address, nbytes, mmap.MAP_PRIVATE | _MAP_FIXED, source.descriptor, source.offset)


def show_zeros(address: int, nbytes: int) -> None:
    """Shows fresh zeroed memory of this process at `address`, which costs nothing until it is touched.

    Raises:
        OSError: the kernel refuses; what was there is still there.
    """
    _map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)


def _map(address: int, nbytes: int, flags: int, descriptor: int, offset: int) -> None:
    if _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset) != address:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap of {nbytes} bytes: {os.strerror(error)}")
