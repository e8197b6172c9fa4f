"""The allocator's settings that suit a process which moves chunks, at either end of the wire. They are the process's to
make: a daemon at its start, a client when it chooses streams."""

from __future__ import annotations

import ctypes
import logging

log = logging.getLogger(__name__)

# From malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# Larger than a chunk in any wrapping: such buffers come from the heap.
_FROM_HEAP_BYTES = 4 << 20
# What stays of the heap's free end.
_KEPT_BYTES = 16 << 20


def keep_chunk_buffers() -> None:
    """Lets glibc keep the memory of chunks from one to the next one; elsewhere, does nothing.

    gRPC and Python take and free a few buffers for each chunk. By default each of them is mapped, zeroed page by page
    and unmapped again, or cut from the end of the heap and given back: that took longer than moving the bytes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((_M_MMAP_THRESHOLD, _FROM_HEAP_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES)):
        if not mallopt(parameter, value):
            log.warning("the allocator refuses a setting, streams will be slow: mallopt(%d, %d)", parameter, value)
