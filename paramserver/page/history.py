"""Samples of a running store, one every two seconds, so that a page that is opened later shows the last minutes.

This module owns the samples, whose number is bounded. A sample must stay cheap: its cost does not depend on how many
tensors the store has.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from paramserver.page.steps import StepLog
from paramserver.process.loop_watch import LoopWatch
from paramserver.sessions.sessions import Sessions
from storage.base.shard import TierName
from storage.engine import Engine
from storage.tiers.contract import Tier

INTERVAL_SECONDS = 2.0
# The number of samples in the page's history: those of the last ten minutes, one every two seconds.
KEPT_SAMPLES = 300
# The most storage devices whose rates the page's history has in columns of their own.
MOST_DEVICES = 16

Number = int | float


class History:
    """The last samples of one daemon's figures, for the curves of the page. Use it on the event loop only."""

    def __init__(self, engine: Engine, sessions: Sessions, watch: LoopWatch, steps: StepLog) -> None:
        self._engine = engine
        self._sessions = sessions
        self._watch = watch
        self._steps = steps
        self._samples: deque[Sequence[Number]] = deque(maxlen=KEPT_SAMPLES)
        self._taken = 0
        self._counters = self._count()
        self._sampled_at = time.monotonic()
        self.columns = ("time", *self._counters, *self._levels())

    @property
    def next_number(self) -> int:
        """The number of the sample that is taken next; the first one has number 0."""
        return self._taken

    @property
    def _tiers(self) -> Sequence[Tier]:
        """All tiers but host memory. The gpu tier is always among them, because the columns of samples are fixed."""
        engine = self._engine
        return (engine.gpu, *(tier for tier in engine.tiers if tier is not engine.gpu and tier is not engine.host))

    async def take(self) -> None:
        """Take a sample. A counter's value in it is the counter's growth per second since the sample before."""
        counters, now = self._count(), time.monotonic()
        # If two samples follow each other at once, the clock may show the same time for both. A period of at least 1 ms
        # avoids a division by zero.
        seconds = max(now - self._sampled_at, 1e-3)
        rates = [_short((counters[name] - before) / seconds) for name, before in self._counters.items()]
        levels = map(_short, self._levels().values())
        self._samples.append((round(time.time(), 1), *rates, *levels))
        self._taken += 1
        self._counters, self._sampled_at = counters, now

    def since(self, number: int) -> Sequence[Sequence[Number]]:
        """Return the samples from `number` on, oldest first, as far as they are kept."""
        first = self._taken - len(self._samples)
        return list(islice(self._samples, max(0, number - first), None))

    def _count(self) -> Mapping[str, Number]:
        """Return the figures of a sample that only grow, of which samples have the growth per second.

        Some figures are clocks, which run while an operation is under way or waits. The growth of a clock in a second
        is the share of the second in which the clock ran.
        """
        engine, steps = self._engine, self._steps
        figures: dict[str, Number] = {"host_fetched_bytes_per_second": steps.fetched_bytes}
        for tier in self._tiers:
            figures |= {f"{tier.name}_{figure}": value for figure, value in _traffic(tier).items()}
        for index, device in enumerate(engine.nvme.files[:MOST_DEVICES]):
            figures[f"device_{index}_bytes_per_second"] = device.io.load.bytes_moved
        return figures | {
            "scrubbed_bytes_per_second": engine.scrubber.bytes_read,
            "loop_stalls_per_second": self._watch.stalls,
            "room_waiting": engine.host.waiting.elapsed,
            "fetch_waiting": steps.waiting_seconds,
        }

    def _levels(self) -> Mapping[str, Number]:
        """Return the figures of a sample that go up and down, such as used bytes."""
        engine, host = self._engine, self._engine.host
        figures: dict[str, Number] = {
            "host_used_bytes": host.used_bytes,
            "host_room_queue": host.queue_depth,
            "host_fetch_queue": engine.queue.depth,
        }
        for tier in self._tiers:
            figures |= {f"{tier.name}_used_bytes": tier.used_bytes, f"{tier.name}_queue": tier.queue_depth}
        for index, device in enumerate(engine.nvme.files[:MOST_DEVICES]):
            load = device.io.load
            figures[f"device_{index}_queue"] = load.queued
            figures[f"device_{index}_stalled_seconds"] = load.stalled_seconds
        now = asyncio.get_running_loop().time()
        silent_seconds = max((now - session.heard_at for session in self._sessions), default=0.0)
        return figures | {"silent_seconds": silent_seconds}


def _traffic(tier: Tier) -> Mapping[str, Number]:
    counters = tier.counters
    moved = {"read_bytes_per_second": counters.bytes_read, "written_bytes_per_second": counters.bytes_written}
    # The history has no copying time for the gpu tier, because clients copy the bytes of their devices and the daemon
    # does not know how long that took.
    if tier.name is TierName.GPU:
        return moved
    return moved | {"reading": counters.reading.elapsed, "writing": counters.writing.elapsed}


def _short(value: Number) -> Number:
    """Return the value with as many digits as a page can show, because a document has thousands of values."""
    return round(value) if value >= 100 else round(value, 3)
