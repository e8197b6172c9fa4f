"""The memory behind a flat buffer, given back and taken again in place: tensors that view it stay what they are.

[Note: host memory] malloc keeps what is freed. Blocks of up to 32 MiB come from its heap, where the activations of a
forward are put into the hole that one unit left, so that the next unit needs new memory: a pass over 128 units of 1 MiB
grew the process by 128 MiB. So the CPU's flat buffers are pages of their own, which go back to the kernel at once. A
device's allocator has no such trouble.

Such pages read as zeros afterwards, where torch would refuse to read a storage without memory. So that nobody computes
with them unnoticed, some elements are NaN while the memory is given back, at the price of a page for each.

[Note: shown memory] Pages of its own also let a flat buffer show bytes that lie in the store's shared memory, at the
buffer's own address: nothing is copied (25 MB: 20 ms with a copy into fresh pages, 3 ms of page faults without;
measured). What is written to a shown page is this process's alone. Whoever shows bytes holds the lease on them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from trainer_client.transport.mapping import FileRange, show_file, show_zeros


class FlatMemory:
    """Attributes:
    tensor: [numel] of the dtype; uninitialised after `take`, not to be read after `give_back`. Made given back.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, marks: Sequence[int] = ()) -> None:
        """`marks`: the elements that are NaN while the memory is given back, on the CPU."""
        self._nbytes = numel * dtype.itemsize
        self._pages: mmap.mmap | None = None
        self._is_there = False
        self._shows = False
        self._marks = torch.tensor(marks, dtype=torch.int64)
        if device.type == "cpu" and numel:
            # Private: the kernel would keep the pages of a shared mapping, wherever it shows them.
            self._pages = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._pages, dtype=dtype)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    @property
    def is_there(self) -> bool:
        return self._is_there

    def take(self) -> None:
        self._is_there = True
        if self._pages is None:
            self.tensor.untyped_storage().resize_(self._nbytes)

    def show(self, offset: int, nbytes: int, source: FileRange) -> bool:
        """Shows the bytes of `source` from byte `offset` on, `nbytes` of them, until the memory is given back or owned;
        False where that cannot be: the memory has no pages of its own, or the bytes share one with others."""
        whole = offset + nbytes == self._nbytes or nbytes % mmap.PAGESIZE == 0
        if self._pages is None or not whole or offset % mmap.PAGESIZE or source.offset % mmap.PAGESIZE:
            return False
        show_file(self.tensor.data_ptr() + offset, nbytes, source)
        self._shows = True
        return True

    def own(self) -> None:
        """Copies what is shown: the memory is all of this process afterwards, with the same values."""
        if self._shows:
            values = self.tensor.clone()
            self._hide()
            self.tensor.copy_(values)

    def give_back(self) -> None:
        self._is_there = False
        if self._pages is None:
            self.tensor.untyped_storage().resize_(0)
            return
        if self._shows:
            self._hide()
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)
        self.tensor.index_fill_(0, self._marks, torch.nan)

    def _hide(self) -> None:
        show_zeros(self.tensor.data_ptr(), self._nbytes)
        self._shows = False
