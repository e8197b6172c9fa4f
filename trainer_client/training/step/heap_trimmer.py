"""Returns the free memory of the heap to the kernel while a pass goes over tiles on the CPU.

[Note: holes] Each use of a tile makes and frees tensors of some MiB: its outputs, its gradient, and the gradient in
fp32. glibc takes these tensors from its heap, not from mappings of their own, once tensors of this size have been
freed. A small block that outlives the tile, as an object of autograd does, takes a few bytes of a freed place, so the
next tile's tensor of the same size does not fit there and takes new memory: a backward pass over 128 tiles of 8 MiB
left 4 GiB of such holes. The kernel takes the pages of holes back, and gives zeroed pages as soon as they are used
again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from trainer_client.base.own_memory import private_bytes

# Free memory is returned to the kernel only after the process has grown by this many bytes, because the kernel needs
# some 0.1 s for each GiB that it takes back and gives again.
_GROWTH_BYTES = 64 << 20


class HeapTrimmer:
    """Trims the heap of this process. With a C library other than glibc it does nothing.

    trimmer.trim_if_grown()    # between two uses of tiles
    """

    def __init__(self) -> None:
        # The function malloc_trim of glibc, which returns free heap memory to the kernel; None with another C library.
        # Its argument is the number of free bytes to leave at the end of the heap.
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        # The smallest size of the process's private memory since free memory was last returned to the kernel. The
        # growth of the process is measured from this size.
        self._least = private_bytes()

    def trim_if_grown(self) -> None:
        """Return free memory to the kernel if the process has grown by 64 MiB since it was smallest; see [Note: holes].

        Memory that is in use makes the process grow, too. In that case there is little memory to return, so the call is
        quick.
        """
        if self._trim is None:
            return
        now = private_bytes()
        if now - self._least < _GROWTH_BYTES:
            self._least = min(self._least, now)
        else:
            self._trim(0)
            self._least = private_bytes()
