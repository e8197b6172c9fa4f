"""DeepSpeed's `engine.tput_timer`: the samples that the engine trains in a second, and the script's count of epochs.

This module owns the counters and the clock. No decision of the engine may depend on them, because scripts reset them.
"""

from __future__ import annotations

import time

# The first steps compile, allocate and fill caches, and so are slower. The rate of samples does not count the first two
# steps, as in DeepSpeed.
_WARM_UP_STEPS = 2


class ThroughputTimer:
    """Counts samples and time, for `engine.tput_timer`: how many samples one engine trains in a second.

    Attributes:
        epoch_count: how often the script has called `update_epoch_count`.
        micro_step_count: the number of micro-batches that have ended since the last such call.
        global_step_count: the number of steps that this process has made or skipped.
        total_elapsed_time: seconds from the end of the second step to the end of the last step. The time between two
            steps counts, for example the time of the data loader; DeepSpeed leaves this time out.
    """

    def __init__(self) -> None:
        """Begin to count steps, micro-batches and epochs from 0."""
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._samples = 0
        self._started: float | None = None

    def update_epoch_count(self) -> None:
        """Begin an epoch. Scripts that were written for DeepSpeed call this at the end of each epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def end_micro_batch(self) -> None:
        """Count a micro-batch. The engine calls this."""
        self.micro_step_count += 1

    def end_step(self, samples: int) -> None:
        """Count a step, in which all ranks together have trained `samples` samples. The engine calls this."""
        now = time.monotonic()
        self.global_step_count += 1
        if self._started is not None:
            self._samples += samples
            self.total_elapsed_time = now - self._started
        elif self.global_step_count >= _WARM_UP_STEPS:
            self._started = now

    def avg_samples_per_sec(self) -> float:
        """Return the samples that all ranks train in a second; -inf before the end of the third step, as DeepSpeed."""
        return self._samples / self.total_elapsed_time if self._samples else float("-inf")
