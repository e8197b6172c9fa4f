"""Measurements of the memory, CPU time and disk traffic of a process and its children.

This module must never change these processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

# A peak, such as that of the gradients of the logits, lasts some 50 ms in a step of a second, and its highest part
# less. A sample of anonymous memory alone takes 0.1 ms and holds up no process.
SAMPLE_SECONDS = 0.005
# Shares of mapped memory change slowly. A sample of them holds up a process that maps or frees memory meanwhile, and
# takes 100 ms for 10 GiB that are in use. So the watch waits for at least so long between two of them, and for so many
# times as long as the last one took.
SHARES_SECONDS = 0.25
PAUSES_PER_SAMPLE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Proportional memory (PSS) in bytes: a page of mapped memory is divided between the processes that map it.

    Anonymous memory is not divided, because these processes share none: each is started anew, not forked.

    Attributes:
        main: the memory of the process itself, which is the trainer.
        children: the memory of all its descendants; the store daemon is one of them.
    """

    main: int
    children: int

    @property
    def total(self) -> int:
        return self.main + self.children

    def __add__(self, other: Memory) -> Memory:
        return Memory(main=self.main + other.main, children=self.children + other.children)


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
        # The children that the last call of `shares` found. A search for children reads a file of each process.
        self._found: list[int] = []

    def memory(self) -> Memory:
        """Return the memory now. This takes some ms per GiB, during which the process cannot map memory."""
        return self.shares() + self.anonymous()

    def shares(self) -> Memory:
        """Return the shares of mapped memory, such as libraries and the arena. This takes some ms per GiB in use."""
        self._found = [process.pid for process in self._children()]
        return self._sum(_mapped_bytes)

    def anonymous(self) -> Memory:
        """Return the anonymous memory of the process and of the children that the last call of `shares` found.

        This takes some 0.1 ms, and holds up no process.
        """
        return self._sum(_anonymous_bytes)

    def _sum(self, measure: Callable[[int], int]) -> Memory:
        return Memory(main=measure(self._main.pid), children=sum(map(measure, self._found)))

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
        next_shares = 0.0
        while not self._ended.wait(SAMPLE_SECONDS):
            if (began := time.monotonic()) >= next_shares:
                try:
                    shares = self._tree.shares()
                except psutil.NoSuchProcess:
                    return  # The process has ended. The thread that waits for its answer reports that.
                ended = time.monotonic()
                next_shares = ended + max(SHARES_SECONDS, PAUSES_PER_SAMPLE * (ended - began))
            self.peak = larger(self.peak, self._tree.anonymous() + shares)


def larger(one: Memory, other: Memory) -> Memory:
    """Return that of the two whose total is larger."""
    return max(one, other, key=lambda memory: memory.total)


def _anonymous_bytes(pid: int) -> int:
    return _sizes(pid, "status").get("RssAnon", 0)


def _mapped_bytes(pid: int) -> int:
    sizes = _sizes(pid, "smaps_rollup")
    return sizes.get("Pss", 0) - sizes.get("Pss_Anon", 0)


def _sizes(pid: int, name: str) -> dict[str, int]:
    """Return the sizes in a file of /proc, in bytes. A process that has ended has none."""
    try:
        text = Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    lines = (line.split() for line in text.splitlines())
    return {words[0].removesuffix(":"): int(words[1]) << 10 for words in lines if words[-1:] == ["kB"]}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
