"""The settings of glibc's allocator that suit a process which moves chunks, at either end of the wire.

They change the whole process. So a daemon makes them at its start, and a client only if it chooses streams.
"""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

# The numbers of two parameters of glibc's function mallopt(), from its header malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# malloc takes buffers of up to this size from the heap and does not map them one by one. A chunk with its message
# around it is smaller, so its memory can be used again.
_FROM_HEAP_BYTES = 4 << 20
# malloc keeps this number of free bytes at the end of the heap, and returns only what is beyond them to the kernel.
_KEPT_BYTES = 16 << 20


def keep_chunk_buffers() -> None:
    """Let glibc keep the memory of one chunk for the next one. With another C library this does nothing.

    gRPC and Python allocate and free a few buffers for each chunk. By default, glibc maps each of them, so that the
    kernel zeroes it page by page, and unmaps it again; or glibc cuts it from the end of the heap and trims the heap
    afterwards. That took longer than moving the bytes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((_M_MMAP_THRESHOLD, _FROM_HEAP_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES)):
        if not mallopt(parameter, value):
            log.warning("the allocator refuses a setting, streams will be slow: mallopt(%d, %d)", parameter, value)
