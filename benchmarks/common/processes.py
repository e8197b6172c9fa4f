"""Measurements of the memory, CPU time and disk traffic of a process and its children.

This module must never change these processes.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil

# A peak, such as that of the gradients of the logits, lasts some 50 ms in a step of a second.
SAMPLE_SECONDS = 0.02
# A sample holds up a process that maps or frees memory meanwhile, and takes 100 ms for 10 GiB that are in use. So the
# watch pauses for this many times as long as the sample took.
PAUSES_PER_SAMPLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Proportional memory (PSS) in bytes: a shared page is divided between the processes that map it.

    Attributes:
        main: the memory of the process itself, which is the trainer.
        children: the memory of all its descendants; the store daemon is one of them.
    """

    main: int
    children: int

    @property
    def total(self) -> int:
        return self.main + self.children


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The resources that a process and its children have used since they started."""

    main_cpu_seconds: float
    children_cpu_seconds: float
    bytes_read: int
    bytes_written: int

    def since(self, before: Use) -> Use:
        """Return the resources that were used since `before` was read."""
        return Use(
            main_cpu_seconds=self.main_cpu_seconds - before.main_cpu_seconds,
            children_cpu_seconds=self.children_cpu_seconds - before.children_cpu_seconds,
            bytes_read=self.bytes_read - before.bytes_read,
            bytes_written=self.bytes_written - before.bytes_written,
        )


class ProcessTree:
    """A process with all its children."""

    def __init__(self, pid: int) -> None:
        self._main = psutil.Process(pid)

    def memory(self) -> Memory:
        """Return the memory now. This takes some ms per GiB, during which the process cannot map memory."""
        return Memory(main=_pss_bytes(self._main), children=sum(map(_pss_bytes, self._children())))

    def use(self) -> Use:
        """Return the use until now.

        The bytes are those that the disks read and wrote, on behalf of the page cache or of direct I/O.
        """
        children = self._children()
        moved = [process.io_counters() for process in (self._main, *children)]
        return Use(
            main_cpu_seconds=_cpu_seconds(self._main),
            children_cpu_seconds=sum(map(_cpu_seconds, children)),
            bytes_read=sum(counters.read_bytes for counters in moved),
            bytes_written=sum(counters.write_bytes for counters in moved),
        )

    def _children(self) -> list[psutil.Process]:
        return self._main.children(recursive=True)


class MemoryWatch:
    """A context that samples the memory of a process tree, and keeps the largest total in `peak`."""

    def __init__(self, tree: ProcessTree) -> None:
        self._tree = tree
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self.peak = tree.memory()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        pause = SAMPLE_SECONDS
        while not self._ended.wait(pause):
            began = time.monotonic()
            try:
                self.peak = larger(self.peak, self._tree.memory())
            except psutil.NoSuchProcess:
                return  # The process has ended. The thread that waits for its answer reports that.
            pause = max(SAMPLE_SECONDS, PAUSES_PER_SAMPLE * (time.monotonic() - began))


def larger(one: Memory, other: Memory) -> Memory:
    """Return that of the two whose total is larger."""
    return max(one, other, key=lambda memory: memory.total)


def _pss_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
