"""The engine's methods for the passes of a training loop, and for the step that ends them.

This module owns the order of a step. It must never call torch.distributed or the store itself, because other modules
own the collectives, the leases and the hooks.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer_client.engine.changes import StateChanges
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.errors import NonFiniteGradientError, NotScalarError, PhaseError
from trainer_client.training.report.step_report import StepReport
from trainer_client.training.step.precision import LossScaler, PrecisionPolicy

log = logging.getLogger(__name__)


class LoopPasses:
    """The forwards, backward passes and steps of a training loop."""

    def __init__(self, loop: TrainingLoop, changes: StateChanges) -> None:
        """Serve the calls of one engine."""
        rank, parts = loop.rank, loop.parts
        self._loop, self._changes = loop, changes
        self._device = rank.collectives.device
        self._settings = rank.settings
        self._precision = PrecisionPolicy.of(rank.settings)
        self._collectives = rank.collectives
        self._log_context = rank.log_context
        self._in_place = parts.in_place
        self._gather = parts.gather
        self._micro_batches = parts.micro_batches
        self._hooks = parts.hooks
        self._step = parts.step
        self._scaler = parts.scaler
        self._whole_parameters = parts.whole_parameters
        self._commits = parts.commits
        self._passes = parts.passes
        self._run_state = parts.run_state
        self._activations = parts.activations
        self._reporter = parts.reporter
        self._was_step_applied = False

    def forward(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of `model`: the engine's, or what the script has set in its place, such as a compiled one."""
        self._loop.require_open()
        self._hooks.forward.expect_none()
        self._passes.expect_loss()
        if torch.is_grad_enabled() and not self._loop.is_within_step:
            self._run_state.note_late_changes()
        try:
            with self._precision.autocast(self._device), self._saving_boundaries():
                return model(*args, **kwargs)
        except BaseException:
            self._hooks.forward.fail()
            raise

    def _saving_boundaries(self) -> AbstractContextManager[None]:
        """Return the context around a forward in which boundaries of activation checkpoints may leave the device."""
        return nullcontext() if self._activations is None else self._activations.saving()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward pass of a micro-batch. All ranks must call this.

        The loss is divided by the accumulation steps and multiplied by the loss scale. A step may have several backward
        passes per micro-batch, whose gradients add up. The user may also call `loss.backward()`, or
        `output.backward(gradient)` for an output that is no scalar.

        Args:
            loss: 0-D, the mean loss over this rank's micro-batch.
            scale_wrt_gas: if False, the loss is not divided by the accumulation steps.

        Returns:
            The loss divided by the accumulation steps.

        Raises:
            NotScalarError: the loss is no scalar.
        """
        self._loop.require_open()
        _require_scalar("engine.backward(loss)", loss, "pass a scalar, or call output.backward(gradient)")
        divisor = self._micro_batches.sizes.accumulation if scale_wrt_gas else 1
        if divisor > 1:
            loss = loss / divisor
        scaled = self._scaler.scaled(loss)
        plan = self._passes.begin()
        try:
            self._hooks.backward.begin(plan)
            with self._passes.multiplied(self._scaler.scale / divisor):
                torch.autograd.backward(scaled, retain_graph=retain_graph)
            self._hooks.backward.finish()
        except BaseException as error:
            self._loop.fail_backward(error)
            raise
        self._passes.end()
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss (0-D) times the loss scale, for `engine.scale(loss).backward()`, which fp16 needs.

        For one loss of several engines, pass the result to the next engine's `scale`. The loss is then multiplied by
        the smallest scale of these engines, and each gets gradients of its own scale.

        Raises:
            NotScalarError: the loss is no scalar.
        """
        self._loop.require_open()
        _require_scalar("engine.scale(loss)", loss, "pass a scalar")
        return self._passes.scale(loss)

    def require_reduced_gradients(self) -> None:
        """Check that the user's `loss.backward()` has not failed. It has reduced its gradients when it returns.

        DeepSpeed's documentation tells scripts for versions before 0.18.3 to call this method, as `_backward_epilogue`,
        of each engine after the backward pass of a loss that several engines have computed.

        Raises:
            PhaseError: the backward pass has failed.
        """
        self._loop.require_open()

    def step(self) -> None:
        """End a micro-batch. At the accumulation boundary, make a step and commit it. All ranks must call this.

        The call returns when the store has the gradients, and when the parameters and optimizer states that live on
        the device are updated. The store goes on with its updates and with the commit; if they fail, the next step,
        `wait_for_commit` or `close` raises the error. A step with a non-finite gradient is skipped on every rank.

        Raises:
            ConfigError: a parameter group or a parameter was changed so that no step can be made; no step was begun.
            ClientStateError: a value of `client_state`, of a parameter group or of the schedule cannot be committed; no
                step was begun.
            PhaseError: there was no backward pass, or the last micro-batch of the step is within `no_sync`.
            UnusedParameterError: `zero_optimization.ignore_unused_parameters` is false, and no rank has a gradient of
                some parameter.
            NonFiniteGradientError: at least `paramserver.max_consecutive_skipped_steps` steps in a row were skipped.
            StoreError: the store failed; the last committed step is intact.
        """
        self._loop.require_open()
        if self._whole_parameters.is_holding:
            raise RuntimeError("step() within gathered(): leave it first, the step changes the parameters")
        if not self._micro_batches.backwards:
            raise PhaseError("step() without backward(): there is no gradient")
        boundary = self._micro_batches.is_last
        if boundary and not self._micro_batches.syncs:
            raise PhaseError(
                "It is illegal to call Engine.step() inside no_sync context manager, or inside that of "
                "coalesce_grad_reduction(), for the last micro-batch of a step: leave it first, because a step "
                "communicates"
            )
        if boundary:
            self._loop.optimizer.check_groups()
            self._run_state.require_committable(self._loop.client_state)
        self._was_step_applied = False
        self._micro_batches.end()
        self._loop.tput_timer.end_micro_batch()
        if not boundary:
            return
        voted = self._commits.newest
        try:
            self._hooks.begin_step()
            self._make_step()
        except BaseException as error:
            self._step.abandon(is_voted_for=self._commits.newest != voted)
            self._loop.abandon_run("engine.step()", error)
            raise
        self._report()
        skipped, limit = self._step.skipped_in_row, self._settings.paramserver.max_consecutive_skipped_steps
        if limit is not None and skipped >= limit:
            raise NonFiniteGradientError(
                f"the gradients of {skipped} steps in a row, up to step {self._loop.global_steps}, are not finite "
                "(paramserver.max_consecutive_skipped_steps): look at the data and the learning rate; the states are "
                "those before these steps"
            )

    def _make_step(self) -> None:
        """Make or skip the step, and begin its commit. All ranks must call this."""
        # Every rank waits for its last commit before it takes part in the collective that computes the gradient's norm.
        # So when a rank has the norm, the last step is committed on every rank.
        self._commits.wait()
        # A program may have several engines, and the last step may have been another engine's. So this engine's
        # attributes (job, step, rank) replace those of the other engine in log records.
        self._log_context.enter()
        self._log_context.step = self._loop.global_steps + 1
        if self._changes.adopt():
            self._changes.commit()
        made = self._was_step_applied = self._step.make(self._commits.next)
        self._loop.global_steps += 1
        self._loop.global_samples += self._micro_batches.samples
        self._loop.tput_timer.end_step(self._micro_batches.samples)
        self._micro_batches.end_step()
        if not made:
            number, norm = self._loop.global_steps, self._step.gradient_norm
            log.warning("step %d is skipped: its gradient norm is %s", number, norm)
        elif self._loop.lr_scheduler is not None:
            self._loop.lr_scheduler.step()
        # The commit begins after the scheduler has stepped, so that a resume starts with the learning rate that an
        # uninterrupted run has.
        self._commits.end_step(self._loop.global_steps, partial(self._loop.encoded_state, ends_step=True))
        if self._gather.is_one_sided:
            self._collectives.barrier()
        self._step.refresh()
        self._in_place.note()
        self._hooks.finish_step()
        self._passes.end_step()
        if self._activations is not None:
            self._activations.end_step(self._loop.global_steps)

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` has updated the parameters.

        The result is False if the call ended a micro-batch that was not the last of its step, or if the step was
        skipped because the gradient was not finite.
        """
        return self._was_step_applied

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group in the next step."""
        return [group["lr"] for group in self._loop.optimizer.param_groups]

    def get_mom(self) -> list[float | tuple[float, float]]:
        """Return the momentum, or else the betas, of each parameter group in the next step; 0.0 for neither."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._loop.optimizer.param_groups]

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scaler, from which the user may read the loss scale. It must not be changed."""
        return self._scaler

    def _report(self) -> None:
        """Begin the report of the step. At each `steps_per_print`-th step, rank 0 also logs a line about the step."""
        line = None
        every = self._settings.steps_per_print
        if self._collectives.rank == 0 and every and self._loop.global_steps % every == 0:
            rates = [float(group["lr"]) for group in self._loop.optimizer.param_groups]
            shown = (self._loop.global_steps, self._step.skipped, rates, self._step.gradient_norm)

            def line(report: StepReport) -> None:
                log.info("step=%d skipped=%d lr=%s norm=%s %s", *shown, report)

        self._reporter.end_step(self._loop.global_steps, line)
        self._log_context.step = self._loop.global_steps + 1


def _require_scalar(call: str, loss: torch.Tensor, instead: str) -> None:
    """Raise NotScalarError if the loss that `call` was given has not one element; `instead` says what to do."""
    if loss.numel() != 1:
        raise NotScalarError(f"{call} needs a scalar tensor, and this one has shape {list(loss.shape)}: {instead}")
