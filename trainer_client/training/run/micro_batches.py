"""The micro-batches of a step: which one is the last, and whether its backward pass communicates.

This module owns the counts of micro-batches, and the user's settings of them. It must never run a forward, a backward
pass or a step: the engine asks this module, and then acts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer_client.config.batch_sizes import BatchSizes
from trainer_client.errors import PhaseError
from trainer_client.training.run.data_loader import TrainingLoader
from trainer_client.training.step.gradients import ReductionSchedule


class MicroBatches:
    """The counts of micro-batches and backward passes of one engine.

    Attributes:
        sizes: the batch sizes, as the config or the user's last change has set them.
        micro_steps: micro-batches ended so far, in the life of the job.
        micro_steps_of_steps: how many of these micro-batches belong to steps that were made or skipped.
        backwards: backward passes since the last step was made.
        syncs: whether backward passes may communicate: False within `no_sync`.
        is_managed: whether the micro-batches of a step are counted, so that the count says which one is the last.
    """

    def __init__(
        self, sizes: BatchSizes, reduction: ReductionSchedule, data: TrainingLoader | None, *, is_managed: bool = True
    ) -> None:
        """Begin with all counts at 0.

        Args:
            data: the loader whose cursor moves with the micro-batches, if the engine has one.
            is_managed: whether the micro-batches of a step are counted. If not, each call of `step` ends a step.
        """
        self.sizes = sizes
        self.micro_steps = 0
        self.micro_steps_of_steps = 0
        self.backwards = 0
        self.syncs = True
        self.is_managed = is_managed
        self._reduction = reduction
        self._data = data
        self._boundary: bool | None = None
        # Whether each backward pass counts as one micro-batch of the data. If not, the call of `end` counts the
        # micro-batch.
        self._counts_passes = not is_managed

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch under way is the last of its step, as far as is known before `step` is called."""
        if self._boundary is not None:
            return self._boundary
        return not self.is_managed or (self.micro_steps + 1) % self.sizes.accumulation == 0

    @property
    def reduces(self) -> bool:
        """Whether the backward pass of the micro-batch under way reduces gradients over the ranks."""
        return self.syncs and (self.is_last or self._reduction is ReductionSchedule.MICRO_BATCH)

    @property
    def samples(self) -> int:
        """The number of samples of all ranks in the step under way."""
        of_micro_batch = self.sizes.train // self.sizes.accumulation
        return self.sizes.train if self.is_managed else of_micro_batch * self.backwards

    @property
    def keeps_gradients(self) -> bool:
        """Whether a step has several micro-batches, so that gradients must be kept until the step."""
        return self.is_managed and self.sizes.accumulation > 1

    def set_last(self, is_last: bool | None) -> None:
        """Set whether the micro-batch under way is the last of its step, until the next call.

        With None, the number of micro-batches in the config decides.

        Raises:
            PhaseError: micro-batches are not counted, so that each call of `step` makes a step.
        """
        if not self.is_managed:
            raise PhaseError(
                "set_gradient_accumulation_boundary() with managed_gradient_accumulation = false: call step() where "
                "the step ends, and nothing else"
            )
        self._boundary = is_last

    def set_train_batch_size(self, train: int, world_size: int, *, steps: int) -> None:
        """Change the number of micro-batches in a step, so that a step of all ranks has `train` samples.

        Args:
            steps: how many steps the job has made. The count of micro-batches becomes that of so many whole steps.

        Raises:
            ValueError: no number of micro-batches has `train` samples.
        """
        micro = self.sizes.micro
        if train < 1 or train % (micro * world_size):
            raise ValueError(
                f"set_train_batch_size({train}): write a multiple of train_micro_batch_size_per_gpu * world size = "
                f"{micro} * {world_size}"
            )
        self.sizes = BatchSizes(train=train, micro=micro, accumulation=train // (micro * world_size))
        # The count of micro-batches is set as if every step so far had had the new number of micro-batches. So the next
        # micro-batch is the first one of a step.
        self.go_on_from(steps * self.sizes.accumulation)

    def set_micro_batch_size(self, micro: int, world_size: int) -> None:
        """Change the number of samples in a micro-batch. Raise ValueError if it is not positive."""
        if micro < 1:
            raise ValueError(f"set_train_micro_batch_size({micro}): write a positive number")
        accumulation = self.sizes.accumulation
        self.sizes = BatchSizes(train=micro * accumulation * world_size, micro=micro, accumulation=accumulation)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep backward passes within the context from reducing gradients over the ranks."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Do as `no_sync`, and count each backward pass within the context as a micro-batch of the data."""
        self._counts_passes = True
        with self.no_sync():
            yield

    def end_backward(self) -> None:
        """Count a backward pass that has ended, as a part of the step under way."""
        self.backwards += 1
        if self._counts_passes and self._data is not None:
            self._data.finish_micro_batch()

    def drop_backwards(self) -> None:
        """Forget the backward passes of the step under way, whose gradients the user has dropped."""
        self.backwards = 0

    def end(self) -> None:
        """Count a micro-batch that has ended. If it is the last one of a step, call this before the step is made."""
        self.micro_steps += 1
        if not self._counts_passes and self._data is not None:
            self._data.finish_micro_batch()
        self._counts_passes = not self.is_managed

    def end_step(self) -> None:
        """Begin the counts of the next step, because a step was made or skipped."""
        self.backwards = 0
        self.micro_steps_of_steps = self.micro_steps
        if self._data is not None:
            self._data.finish_step()

    def go_on_from(self, micro_steps: int) -> None:
        """Continue the count of micro-batches at the beginning of a step, from the number that a commit carried."""
        self.micro_steps = self.micro_steps_of_steps = micro_steps
