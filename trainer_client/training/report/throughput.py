"""DeepSpeed's `engine.tput_timer`: the samples that the engine trains in a second, and the script's count of epochs.

This module owns the counters and the clock. It must never decide anything, because only scripts read it.
"""

from __future__ import annotations

import time

# The first steps compile, allocate and fill caches, so DeepSpeed leaves two out of the rate, and this library as well.
_WARM_UP_STEPS = 2


class ThroughputTimer:
    """The throughput of one engine of this process.

    Attributes:
        epoch_count: how often the script has called `update_epoch_count`.
        micro_step_count: the number of micro-batches that ended since then.
        global_step_count: the number of steps that this process has made or skipped.
        total_elapsed_time: seconds since the end of the second step, up to the end of the last one. The time between
            two steps counts, for example that of the data loader, which DeepSpeed leaves out.
    """

    def __init__(self) -> None:
        """Begin to count."""
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._samples = 0
        self._started: float | None = None

    def update_epoch_count(self) -> None:
        """Begin an epoch, as scripts for DeepSpeed tell the timer at the end of each."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def end_micro_batch(self) -> None:
        """Count a micro-batch. The engine calls this."""
        self.micro_step_count += 1

    def end_step(self, samples: int) -> None:
        """Count a step of so many samples of all ranks. The engine calls this."""
        now = time.monotonic()
        self.global_step_count += 1
        if self._started is not None:
            self._samples += samples
            self.total_elapsed_time = now - self._started
        elif self.global_step_count >= _WARM_UP_STEPS:
            self._started = now

    def avg_samples_per_sec(self) -> float:
        """Return the samples of all ranks in a second; -inf before the third step, as with DeepSpeed."""
        return self._samples / self.total_elapsed_time if self._samples else float("-inf")
