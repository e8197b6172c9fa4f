"""The memory of a flat buffer, freed and allocated again at the same address, so that views of the buffer stay valid.

[Note: host memory] On the CPU, a flat buffer has pages of its own, which go back to the kernel at once when they are
freed. Memory of malloc would not: malloc takes blocks of up to 32 MiB from its heap. When a unit is released, the
activations of a forward fill the hole in the heap, so that the next unit needs new memory. With malloc, a pass over 128
units of 1 MiB grew the process by 128 MiB. The allocator of a GPU does not have this problem.

On a GPU, torch raises an error if a freed flat buffer is read, because its storage has no memory. On the CPU, freed
pages read as zeros. So that a computation with freed memory is noticed there, some elements (the marks) are NaN while
the memory is freed. Each mark costs one page.

[Note: mapped memory] Because a flat buffer has pages of its own, bytes of the store's shared memory can be mapped at
the buffer's address instead of being copied. For 25 MB, the page faults of a mapping take 3 ms, and a copy into fresh
pages takes 20 ms (measured). The mapping is copy-on-write, so writes stay in this process. The caller has to hold the
lease on the bytes as long as they are mapped.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence

import torch

from trainer_client.client.transport.mapping import FileRange, map_file_at, map_zeros_at, written_ranges
from trainer_client.training.model.digests import digest_on_device, digest_on_host


class FlatMemory:
    """The memory of one flat buffer, which `FlatGroup` frees and allocates again at the same address.

    The constructor allocates the memory, so that views of the buffer can be made before the first `free`.

    Attributes:
        tensor: the flat buffer [numel]; uninitialised after `allocate`, and not to be read after `free`.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, marks: Sequence[int] = ()) -> None:
        """Make the buffer.

        Args:
            numel: number of elements.
            dtype: dtype of the elements.
            device: device of the buffer.
            marks: indexes of the elements that are NaN while the memory is freed, on the CPU.
        """
        self._nbytes = numel * dtype.itemsize
        self._pages: mmap.mmap | None = None
        self._is_allocated = True
        # The parts of the buffer to which ranges of files are mapped, in their order: each part's begin and end in
        # bytes, and the range of a file that is mapped at the part.
        self._mapped: list[tuple[int, int, FileRange]] = []
        self._marks = torch.tensor(marks, dtype=torch.int64)
        if device.type == "cpu" and numel:
            # The buffer is a private mapping. The kernel would keep the pages of a shared mapping when the buffer is
            # freed.
            self._pages = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(self._pages, dtype=dtype)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)

    @property
    def is_allocated(self) -> bool:
        return self._is_allocated

    def allocate(self) -> None:
        """Allocate the memory. If it is allocated, do nothing, because a resize of a GPU's storage would copy it."""
        if self._is_allocated:
            return
        self._is_allocated = True
        if self._pages is None:
            self.tensor.untyped_storage().resize_(self._nbytes)

    def map_range(self, offset: int, nbytes: int, source: FileRange) -> bool:
        """Map `nbytes` of `source` at byte `offset` of the buffer, until `free` or `copy_mapped`.

        Return False if the bytes cannot be mapped, because the buffer has no pages of its own, or because the bytes do
        not fill whole pages of the buffer and of the file.
        """
        whole = offset + nbytes == self._nbytes or nbytes % mmap.PAGESIZE == 0
        if self._pages is None or not whole or offset % mmap.PAGESIZE or source.offset % mmap.PAGESIZE:
            return False
        map_file_at(self.tensor.data_ptr() + offset, nbytes, source)
        self._mapped.append((offset, offset + nbytes, source))
        return True

    def digest(self, part: slice) -> int:
        """Return the digest of the bytes in `part`, a range of bytes of a buffer in host memory.

        Bytes that `map_range` has mapped are left out, because `find_changed` finds changes of these.
        """
        assert self._pages is not None, "the buffer is on the CPU"
        return digest_on_host(memoryview(self._pages), self._copied(part.start, part.stop))

    def digest_on_device(self) -> torch.Tensor:
        """Return the digest of the whole buffer, 0-D int64 on its device, without a wait for the device."""
        return digest_on_device(self.tensor)

    def find_changed(self, parts: Sequence[slice]) -> Iterator[int]:
        """Yield the index of each part in which this process has changed mapped bytes since they were mapped.

        Args:
            parts: parts of the buffer, in bytes.
        """
        content = memoryview(b"") if self._pages is None else memoryview(self._pages)
        for begin, end, source in self._mapped:
            for first, last in written_ranges(self.tensor.data_ptr() + begin, end - begin):
                for index, part in enumerate(parts):
                    at, stop = max(part.start, begin + first), min(part.stop, begin + last)
                    stored = os.pread(source.descriptor, max(stop - at, 0), source.offset + at - begin)
                    if bytes(content[at : max(at, stop)]) != stored:
                        yield index

    def _copied(self, begin: int, end: int) -> Iterator[slice]:
        """Yield the parts of [begin, end) that are not mapped."""
        for first, last, _ in self._mapped:
            if begin < first:
                yield slice(begin, min(first, end))
            begin = max(begin, last)
        if begin < end:
            yield slice(begin, end)

    def copy_mapped(self) -> None:
        """Copy the bytes that `map_range` has mapped into memory of this process, and unmap them.

        The caller may then release the leases on the mapped bytes.
        """
        if self._mapped:
            values = self.tensor.clone()
            self._unmap()
            self.tensor.copy_(values)

    def free(self) -> None:
        self._is_allocated = False
        if self._pages is None:
            self.tensor.untyped_storage().resize_(0)
            return
        if self._mapped:
            self._unmap()
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)
        self.tensor.index_fill_(0, self._marks, torch.nan)

    def _unmap(self) -> None:
        map_zeros_at(self.tensor.data_ptr(), self._nbytes)
        self._mapped.clear()
