"""The micro-batches of a step: which one is the last, and whether its backward pass communicates.

Owns their counts, and what the user has said about them. Must never run anything: the engine asks and acts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer_client.config.training_config import BatchSizes
from trainer_client.run.data_loader import TrainingLoader
from trainer_client.step.gradients import ReductionSchedule


class MicroBatches:
    """The counts of micro-batches and backward passes of one engine.

    Attributes:
        sizes: the batch sizes of the config.
        micro_steps: micro-batches ended so far, in the life of the job.
        backwards: backward passes since the last step was made.
        syncs: whether backward passes may communicate: False within `no_sync`.
    """

    def __init__(self, sizes: BatchSizes, reduction: ReductionSchedule, data: TrainingLoader | None) -> None:
        """Begin with no micro-batch.

        Args:
            data: the loader whose cursor moves with the micro-batches, if the engine has one.
        """
        self.sizes = sizes
        self.micro_steps = 0
        self.backwards = 0
        self.syncs = True
        self._reduction = reduction
        self._data = data
        self._boundary: bool | None = None

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.sizes.accumulation == 0

    @property
    def reduces(self) -> bool:
        """Whether the backward pass of the micro-batch under way reduces gradients over the ranks."""
        return self.syncs and (self.is_last or self._reduction is ReductionSchedule.MICRO_BATCH)

    def set_last(self, is_last: bool | None) -> None:
        """Say whether the micro-batch under way is the last of its step, until the next call. None: the config says."""
        self._boundary = is_last

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep backward passes within the context from communicating."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def end_backward(self) -> None:
        """Count a backward pass."""
        self.backwards += 1

    def end(self) -> None:
        """Count a micro-batch, before its step is made if it is the last one."""
        self.micro_steps += 1
        if self._data is not None:
            self._data.finish_micro_batch()

    def end_step(self) -> None:
        """Take note that a step was made or skipped."""
        self.backwards = 0
        if self._data is not None:
            self._data.finish_step()

    def go_on_from(self, micro_steps: int) -> None:
        """Continue the count of micro-batches from the number that a commit carried."""
        self.micro_steps = micro_steps
