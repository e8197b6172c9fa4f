"""The work before and after each backward pass of an engine.

`engine.backward(loss)` starts a pass, and so does the user's own `loss.backward()`, of which the hooks learn by the
first gradient that comes. This module owns the plan of a pass: which step its gradients are for, whether they are
reduced, and by which factor they are scaled. It must never call autograd or a hook.

[Note: a loss of several engines] One backward pass may bring gradients to several engines. Each engine wants its own
gradients times its own loss scale and divided by its own accumulation steps, but a loss is multiplied by one number
only. So each engine corrects its gradients by the ratio of the number that it wants to the number by which the loss was
multiplied. That number is known from `engine.scale(loss)`, which notes it on the loss, and from `engine.backward(loss)`
of another engine, which notes it while autograd runs. Several losses may be scaled before the first backward pass, so a
hook on each of them says which one a pass has come from. Of several loss scales the smallest one is used, because a
larger one would make gradients of the engine that needs the smallest one overflow.

[Note: a loss that is not scaled] In fp16 a loss that was computed by calling the engine has to be scaled. The backward
pass of a loss that is not scaled is refused, as in DeepSpeed. Where the script has called `engine.module` instead,
DeepSpeed takes the loss as it is, and its gradients are too small by the loss scale. Here the gradients are right,
because each one is multiplied by the loss scale after it was computed. Only gradients that are too small for fp16 are
lost, because they are zeros before the multiplication.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial

import torch

from trainer_client.training.run.commits import Commits
from trainer_client.training.run.micro_batches import MicroBatches
from trainer_client.training.step.backward_hooks import BackwardPlan
from trainer_client.training.step.precision import LossScaler
from trainer_client.training.step.training_step import TrainingStep

log = logging.getLogger(__name__)

# The name of the attribute under which `scale` puts a LossFactor on a loss.
_FACTOR = "paramserver_loss_factor"

# The factor of the loss of the innermost call of `engine.backward` that is under way on this thread. It is a
# ContextVar, because passes that other threads have started have other losses.
_under_way: ContextVar[float] = ContextVar("factor of the loss under way", default=1.0)


@dataclass(slots=True)
class LossFactor:
    """The factor that a loss was multiplied by. All engines that have scaled the loss share the object.

    Attributes:
        value: the smallest loss scale of these engines; 1 if no loss scale was applied.
        is_scaled: whether any of the engines needs a scaled loss.
    """

    value: float = 1.0
    is_scaled: bool = False


class BackwardPasses:
    """Begins and ends the backward passes of one engine, and scales the losses and gradients of these passes."""

    def __init__(self, step: TrainingStep, scaler: LossScaler, micro_batches: MicroBatches, commits: Commits) -> None:
        self._step = step
        self._scaler = scaler
        self._micro_batches = micro_batches
        self._commits = commits
        # The factor of the loss whose backward pass is under way. None if the user has not called `scale` for this
        # loss.
        self._factor: LossFactor | None = None
        # `_must_scale`: whether a forward with gradients has gone through the engine since its last step, so that
        # losses must go through `scale`. `_has_warned`: whether the log has the warning about a loss that was not
        # scaled.
        self._must_scale = False
        self._has_warned = False

    def expect_loss(self) -> None:
        """Note that the user has called the engine's forward, so that in fp16 the user's loss has to be scaled."""
        self._must_scale = self._must_scale or torch.is_grad_enabled()

    def end_step(self) -> None:
        """Note that the step has ended, so no pass is refused before the next forward of the engine."""
        self._must_scale = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for a backward pass that the user starts.

        If other engines have scaled the loss, it is returned times the smallest scale of them all.
        """
        factor: LossFactor = getattr(loss, _FACTOR, None) or LossFactor()
        if self._scaler.is_enabled and not (factor.is_scaled and factor.value <= self._scaler.scale):
            if self._scaler.scale != factor.value:
                loss = loss.float() * (self._scaler.scale / factor.value)
            factor.value = self._scaler.scale
            factor.is_scaled = True
        setattr(loss, _FACTOR, factor)
        if loss.requires_grad:
            loss.register_hook(partial(self._come_from, factor))
        return loss

    def _come_from(self, factor: LossFactor, _: torch.Tensor) -> None:
        """Note that the pass under way has come from a loss with this factor."""
        self._factor = factor

    def begin(self) -> BackwardPlan:
        """Begin the pass of `engine.backward`, whose loss is scaled by its caller. All ranks must call this."""
        self._factor = None
        return self._begin(gradient_factor=1.0)

    @contextmanager
    def multiplied(self, factor: float) -> Iterator[None]:
        """Surround the pass of `engine.backward`, so that other engines see the `factor` of its loss."""
        before = _under_way.set(factor)
        try:
            yield
        finally:
            _under_way.reset(before)

    def begin_for_user(self) -> BackwardPlan:
        """Begin a pass that the user, or `backward` of another engine, has started. All ranks must call this.

        The gradients are divided by the number of accumulation steps, because the user's loss is not divided by that
        number; see [Note: a loss of several engines].

        Raises:
            RuntimeError: fp16 training needs a scaled loss, and the loss of this pass is not scaled; see [Note: a loss
                that is not scaled].
        """
        factor, self._factor = self._factor, None
        if self._scaler.is_enabled and factor is None and self._must_scale:
            raise RuntimeError(
                "Loss scaling is required in fp16, and the loss of loss.backward() is not scaled: call "
                "engine.backward(loss) or engine.scale(loss).backward(); scale a loss of several engines with each of "
                "them that trains in fp16"
            )
        multiplied = (1.0 if factor is None else factor.value) * _factor_under_way()
        if self._scaler.is_enabled and factor is None and multiplied <= 1.0 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the loss of a model in fp16 is not scaled: engine.module was called and not the engine, so this is no "
                "error, but small gradients become zero; call engine.scale(loss).backward()"
            )
        wanted = self._scaler.scale / self._micro_batches.sizes.accumulation
        return self._begin(gradient_factor=wanted / multiplied)

    def end(self) -> None:
        """Count a backward pass that has ended without an error, for the end of the step."""
        # The backward of a sum of several scaled losses sets `_factor` once for each loss. The pass has begun with the
        # first factor, and a later one must not count for the next pass, so it is reset here.
        self._factor = None
        self._micro_batches.end_backward()

    def _begin(self, *, gradient_factor: float) -> BackwardPlan:
        is_last, reduces = self._micro_batches.is_last, self._micro_batches.reduces
        self._commits.make_way(for_updates=is_last and reduces)
        self._step.begin_backward(self._commits.next, is_last=is_last and reduces)
        return BackwardPlan(
            step=self._commits.next, reduces=reduces, is_last=is_last and reduces, gradient_factor=gradient_factor
        )


def _factor_under_way() -> float:
    """Return the factor of the loss of `engine.backward`, in a hook of its pass; 1 if the user has started the pass."""
    # Autograd has a thread for each accelerator. torch keeps the context of the thread that has called autograd under
    # the name "context" in the thread-local state, so a hook on autograd's thread finds the factor there.
    if torch._C._is_key_in_tls("context"):
        context: Context = torch._C._get_obj_in_tls("context")
        return context.get(_under_way, 1.0)
    return _under_way.get()
