"""The engine's methods about the gradient of the step under way: its micro-batches, its reduction and its clipping.

This module owns which of these calls are possible before which micro-batch. It must never make a step;
`training/step/training_step.py` does, and keeps the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer_client.engine.training_loop import TrainingLoop


class StepGradient:
    """The gradient of the step under way, as the script drops, clips and reduces it, and its micro-batches."""

    def __init__(self, loop: TrainingLoop) -> None:
        """Serve the calls of one engine."""
        self._loop = loop
        self._collectives = loop.rank.collectives
        self._commits = loop.parts.commits
        self._hooks = loop.parts.hooks
        self._micro_batches = loop.parts.micro_batches
        self._step = loop.parts.step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward passes that no `step` has followed. Every rank must call it alike.

        `zero_grad` of the optimizer and of the model that was passed to `initialize` do the same. A step drops its
        gradients itself, so that a loop needs no call. With more than one micro-batch in a step the call has no effect,
        as with DeepSpeed: the gradients of the earlier micro-batches stay. (If the config says
        `managed_gradient_accumulation: false`, the call always drops them.)

        Args:
            set_to_none: has no effect: a gradient is always dropped, never set to zero.
        """
        self._loop.require_open()
        if self._micro_batches.backwards and not self._micro_batches.keeps_gradients:
            self._step.drop_gradients()
            self._micro_batches.drop_backwards()
            self._hooks.show_gradients()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradient of the step under way by its 2-norm when the step is made. All ranks must call this.

        `max_norm` replaces the config's `gradient_clipping` for this step alone. Call this method after the last
        backward pass of the step, as `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm over all ranks before clipping, without the loss scale. If the norm is not finite, the step is
            skipped.

        Raises:
            RuntimeError: there is no gradient, or it is not reduced over the ranks yet (within `no_sync`).
            ValueError: the limit is not positive.
        """
        self._require_gradient("clip_grad_norm_()")
        _require_limit("clip_grad_norm_", max_norm)
        return self._step.clip_by_norm(self._commits.next, max_norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip each element of the gradient to [-clip_value, clip_value] when the step under way is made.

        The value replaces the config's `paramserver.gradient_clipping_value` for this step alone. Call this method
        after the last backward pass of the step.

        Raises:
            RuntimeError: there is no gradient, or it is not reduced over the ranks yet (within `no_sync`).
            ValueError: the limit is not positive.
        """
        self._require_gradient("clip_grad_value_()")
        _require_limit("clip_grad_value_", clip_value)
        self._step.clip_by_value(clip_value)

    @property
    def has_gradient(self) -> bool:
        """Whether there was a backward pass since the last step whose gradients `zero_grad` has not dropped."""
        return self._micro_batches.backwards > 0

    def _require_gradient(self, what: str) -> None:
        """Raise RuntimeError unless a whole step's gradient is there, because `what` needs it."""
        self._loop.require_open()
        if not self.has_gradient:
            raise RuntimeError(f"{what} without backward(): there is no gradient")
        if not (self._micro_batches.is_last and self._micro_batches.syncs):
            raise RuntimeError(f"{what} before the last micro-batch of a step: call it just before step()")

    def get_global_grad_norm(self) -> float | None:
        """Return the 2-norm of the last step's gradient over all ranks, before clipping; None before the first step.

        As with DeepSpeed, a skipped step does not count, because programs log the norm or add it up. The result is the
        norm of the last step that was not skipped, and 0.0 if this process has only skipped steps so far. The log has
        the norms of skipped steps.

        Without clipping by norm, the norm of bf16 gradients on the CPU is rounded: it is right within 0.1 %.
        """
        return None if self._step.gradient_norm is None else self._step.made_norm

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because the gradient was not finite on some rank."""
        return self._step.skipped

    def was_step_skipped(self) -> bool:
        """Return whether the last step was skipped, because its gradient was not finite on some rank."""
        return self._step.skipped_in_row > 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes within the context reduce no gradients, at any stage. Every rank must enter it alike.

        As with DDP's `no_sync`, these gradients stay whole on each rank's device. The next backward pass outside of the
        context reduces them, or else the step.
        """
        with self._micro_batches.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backward passes within the context once, at its end. All ranks must call this.

        Use the context for steps of many backward passes, at any stage, and call `step` after it. Within the context
        the gradients stay whole on each rank's device, as within `no_sync`. If the context ends by an error, no
        gradient is reduced.

        Raises:
            RuntimeError: the context is within `no_sync` or within another one of its kind.
        """
        self._loop.require_open()
        if not self._micro_batches.syncs:
            raise RuntimeError(
                "coalesce_grad_reduction() within no_sync(), or within another coalesce_grad_reduction(): leave it "
                "first, because the end of the context reduces gradients"
            )
        with self._micro_batches.coalesced():
            yield
        if self._micro_batches.backwards:
            self._step.reduce_gradients(self._commits.next)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Return at once, because a backward pass has reduced its gradients over the ranks when it returns.

        Gradients of passes within `no_sync` are reduced by the next backward pass outside of it, or by the step.

        Args:
            bucket_size: has no effect, because gradients are reduced unit by unit.
        """
        self._loop.require_open()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the micro-batch under way, and each later one until the next call, is the last of its step.

        `step` makes a step only at the end of such a micro-batch.

        With None the config decides.

        Call this before the micro-batch's `backward`, on every rank alike.
        """
        self._micro_batches.set_last(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the micro-batch under way is the last of its step, so that `step` makes or skips a step."""
        return self._micro_batches.is_last

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples in a step of all ranks, by changing its number of micro-batches.

        The call is possible between two steps. Every rank must call it alike. A later run of the job has the batch size
        of its config again.

        Raises:
            ValueError: the size is not a multiple of the samples that the ranks have in one micro-batch each.
        """
        self._loop.require_between_steps("set_train_batch_size()")
        self._micro_batches.set_train_batch_size(
            train_batch_size, self._collectives.world_size, steps=self._loop.global_steps
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples in a micro-batch of one rank, and so the number of samples in a step.

        The call is possible between two steps. The user's loader has to give batches of this size. Every rank must call
        it alike.

        Raises:
            ValueError: the size is not positive.
        """
        self._loop.require_between_steps("set_train_micro_batch_size()")
        self._micro_batches.set_micro_batch_size(micro_batch_size, self._collectives.world_size)

    @property
    def micro_steps(self) -> int:
        """The number of calls of `step`, one per micro-batch."""
        return self._micro_batches.micro_steps


def _require_limit(what: str, limit: float) -> None:
    """Check the limit of a call that clips gradients. Raise ValueError if it is not positive."""
    if not limit > 0:
        raise ValueError(f"{what}({limit}): write a positive limit, or leave the call out so that nothing is clipped")
