"""The threads that run kernels on tiles, and the cores they run on.

[Note: all cores alike] Where trainers compute on the same cores, each of their operations waits for its slowest thread:
a second of the daemon's on one core costs them nearly a second on all. So each tile is shared among the threads, and as
many of them as there are cores are bound to one each: what they take, they take of all cores alike, at the same time.
(Measured on two cores, beside a training step of 3.6 s: 1 CPU s in bursts of one thread made it 0.9 s longer, of two
threads 0.7 s, of two bound threads 0.35 s.)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from storage.threads import begin_work

log = logging.getLogger(__name__)

T = TypeVar("T")


class OptimizerThreads:
    """Attributes:
    count: how many there are.
    """

    def __init__(self, count: int, *, nice: int) -> None:
        """`nice`: see `begin_work`."""
        self.count = count
        self._nice = nice
        cores = sorted(os.sched_getaffinity(0))
        self._cores = itertools.cycle(cores) if count == len(cores) > 1 else None
        self._pool = ThreadPoolExecutor(count, "optimizer", initializer=self._begin)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` on one of them."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Waits for what runs."""
        self._pool.shutdown()

    def _begin(self) -> None:
        begin_work(self._nice)
        torch.set_num_threads(1)
        if self._cores is not None:
            core = next(self._cores)
            try:
                # On Linux the calling thread's alone (man 2 sched_setaffinity).
                os.sched_setaffinity(0, {core})
            except OSError as error:
                log.warning("an optimizer thread cannot be bound to core %d: %s", core, error.strerror)
