"""The engine: DeepSpeed's methods (`forward`, `backward`, `step` and others) for a model whose state is in the store.

This module owns the order of a step and the end of an engine; states.py has the methods that read, change and
save states, memory.py those about memory of the device, and core.py the objects that all these methods
call. This module must never call torch.distributed or the store itself, because other modules own the collectives, the
leases and the hooks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import nn

from trainer_client.base import at_exit
from trainer_client.base.device import CPU
from trainer_client.client.transport.attachments import Restart
from trainer_client.engine.core import EngineParts
from trainer_client.engine.memory import EngineMemory
from trainer_client.errors import (
    CollectiveError,
    NonFiniteGradientError,
    NotScalarError,
    PhaseError,
    TrainerClientError,
)
from trainer_client.training.model.owners import disown, own
from trainer_client.training.model.parameter_offload import ParameterOffload
from trainer_client.training.model.refusals import refuse_conversion
from trainer_client.training.model.states import placement_bytes
from trainer_client.training.report.step_report import StepReport
from trainer_client.training.run.context import RankContext, Resources, UserObjects
from trainer_client.training.run.forgotten import Remains
from trainer_client.training.step.phases import Phase
from trainer_client.training.step.precision import LossScaler

log = logging.getLogger(__name__)

# The modes of torch.compile that record CUDA graphs. The engine warns of them, because each gather makes the recorded
# graphs invalid.
_RECORDING_MODES = ("reduce-overhead", "max-autotune")


class Engine(EngineMemory):
    """The engine of one training loop, made by `trainer_client.initialize`.

    The loop is the same as with DeepSpeed:

        loss = engine(batch); engine.backward(loss); engine.step()

    or, for a loop that was written for torch:

        loss = engine(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()

    The engine is a module with the model as its submodule `module`, as with DeepSpeed and DDP: its parameters are those
    of the model, under names that begin with "module.". Attributes that the engine does not have are the model's, as in
    `engine.generate(...)`.

    Attributes:
        module: the model. At stage 3, its parameters have no values outside of its forward.
        optimizer: gives the hyper-parameters of each step. `engine.step()` steps it.
        lr_scheduler: changes the optimizer's learning rates; None: there is none. `engine.step()` steps it.
        global_steps: the number of training steps made or skipped since the job began, earlier runs included.
        global_samples: the number of samples in these steps.
        resumed_step: the global step that the run started from; 0 for a new job.
        client_state: the user's own values (JSON-like, tensors too), for example a data cursor. They are committed with
            each step, and restored on a resume. Set them before the `step()` that they belong to.
        tput_timer: DeepSpeed's counters of epochs and of samples a second.
    """

    def __init__(self, user: UserObjects, rank: RankContext, parts: EngineParts, resources: Resources) -> None:
        """Make an engine of the parts that assembly.py has made.

        Args:
            resources: the engine takes them over, and closes them when it is closed.
        """
        super().__init__(user, rank, parts, resources.all.pop_all())
        own(user.parameters, self)
        user.optimizer.drive(self)
        if self.zero_optimization_partition_weights():
            user.optimizer.parameter_offload = ParameterOffload(user.module)
        # The hooks on the model refer to the engine, so the engine is not garbage-collected while a script keeps only
        # the model.
        parts.hooks.serve(self)
        self._refusals.replace_zero_grad(user.module, self._drop_gradients)
        self._remains = Remains(self, resources.apart)
        at_exit.register(self, Engine._close_after_failure)
        if rank.collectives.rank == 0:
            log.info("placement, bytes of each rank: %s", self.placement())

    @property
    def micro_steps(self) -> int:
        """The number of calls of `step`, one per micro-batch."""
        return self._micro_batches.micro_steps

    # The methods below have the names and meanings of those of DeepSpeed's engine.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, and return its output. Floating-point inputs are cast to the compute dtype.

        With `torch_autocast` in the config, the forward runs under `torch.autocast`.
        """
        self._require_open()
        self._hooks.forward.expect_none()
        self._passes.expect_loss()
        if torch.is_grad_enabled() and not self._is_within_step:
            self._run_state.note_late_changes()
        try:
            with self._precision.autocast(self.device), self._saving_boundaries():
                return self.module(*args, **kwargs)
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
        self._require_open()
        if loss.numel() != 1:
            raise NotScalarError(
                f"engine.backward(loss) needs a scalar tensor, and this one has shape {list(loss.shape)}: pass a "
                "scalar, or call output.backward(gradient)"
            )
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
            self._fail_backward(error)
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
        self._require_open()
        if loss.numel() != 1:
            raise NotScalarError(
                f"engine.scale(loss) needs a scalar tensor, and this one has shape {list(loss.shape)}: pass a scalar"
            )
        return self._passes.scale(loss)

    def _backward_epilogue(self) -> None:
        """Check that the user's `loss.backward()` has not failed. It has reduced its gradients when it returns.

        The name is DeepSpeed's. Its documentation tells scripts for versions before 0.18.3 to call this method of each
        engine after the backward pass of a loss that several engines have computed.

        Raises:
            PhaseError: the backward pass has failed.
        """
        self._require_open()

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
        self._require_open()
        if self._whole_parameters.is_holding:
            raise RuntimeError("step() within gathered(): leave it first, the step changes the parameters")
        if not self.has_gradient:
            raise PhaseError("step() without backward(): there is no gradient")
        boundary = self._micro_batches.is_last
        if boundary and not self._micro_batches.syncs:
            raise PhaseError(
                "It is illegal to call Engine.step() inside no_sync context manager, or inside that of "
                "coalesce_grad_reduction(), for the last micro-batch of a step: leave it first, because a step "
                "communicates"
            )
        if boundary:
            self.optimizer.check_groups()
            self._run_state.require_committable(self.client_state)
        self._was_step_applied = False
        self._micro_batches.end()
        self.tput_timer.end_micro_batch()
        if not boundary:
            return
        voted = self._commits.newest
        try:
            self._hooks.begin_step()
            self._make_step()
        except BaseException as error:
            self._step.abandon(is_voted_for=self._commits.newest != voted)
            self._abandon_run("engine.step()", error)
            raise
        self._report()
        limit = self._settings.paramserver.max_consecutive_skipped_steps
        if limit is not None and self._step.skipped_in_row >= limit:
            raise NonFiniteGradientError(
                f"the gradients of {self._step.skipped_in_row} steps in a row, up to step {self.global_steps}, are not "
                "finite (paramserver.max_consecutive_skipped_steps): look at the data and the learning rate; the "
                "states are those before these steps"
            )

    def _make_step(self) -> None:
        """Make or skip the step, and begin its commit. All ranks must call this."""
        # Every rank waits for its last commit before it takes part in the collective that computes the gradient's norm.
        # So when a rank has the norm, the last step is committed on every rank.
        self._commits.wait()
        # A program may have several engines, and the last step may have been another engine's. So this engine's
        # attributes (job, step, rank) replace those of the other engine in log records.
        self._log_context.enter()
        self._log_context.step = self.global_steps + 1
        if self._adopt_changes():
            self._commit_change()
        made = self._was_step_applied = self._step.make(self._commits.next)
        self.global_steps += 1
        self.global_samples += self._micro_batches.samples
        self.tput_timer.end_step(self._micro_batches.samples)
        self._micro_batches.end_step()
        if not made:
            log.warning("step %d is skipped: its gradient norm is %s", self.global_steps, self._step.gradient_norm)
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        # The commit begins after the scheduler has stepped, so that a resume starts with the learning rate that an
        # uninterrupted run has.
        self._commits.end_step(self.global_steps, partial(self._client_state, ends_step=True))
        if self._gather.is_one_sided:
            self._collectives.barrier()
        self._step.refresh()
        self._changes.note()
        self._hooks.finish_step()
        self._passes.end_step()
        if self._activations is not None:
            self._activations.end_step(self.global_steps)

    def register_external_parameter(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather `parameter`, which belongs to another module, together with `module` from now on.

        The call is never necessary, because the engine gathers an external parameter when a forward uses it. But with
        the call, torch.compile does not cut the graph of `module` there. DeepSpeed has the same function in
        `deepspeed.zero`.

        Raises:
            ConfigError: the module or the parameter is not part of this engine's model.
        """
        self._hooks.register_external_parameter(module, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward passes that no `step` has followed. Every rank must call it alike.

        `zero_grad` of the optimizer and of the model that was passed to `initialize` do the same. A step drops its
        gradients itself, so that a loop needs no call. With more than one micro-batch in a step the call has no effect,
        as with DeepSpeed: the gradients of the earlier micro-batches stay. (If the config says
        `managed_gradient_accumulation: false`, the call always drops them.)

        Args:
            set_to_none: has no effect: a gradient is always dropped, never set to zero.
        """
        self._require_open()
        if self._micro_batches.backwards and not self._micro_batches.keeps_gradients:
            self._step.drop_gradients()
            self._micro_batches.drop_backwards()
            self._hooks.show_gradients()

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        """Drop what `zero_grad` drops, and the `.grad` of parameters whose gradients the engine does not take."""
        self.zero_grad(set_to_none)
        if not self.has_gradient:
            type(self.module).zero_grad(self.module, set_to_none)

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
        self._require_open()
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

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group in the next step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[float | tuple[float, float]]:
        """Return the momentum, or else the betas, of each parameter group in the next step; 0.0 for neither."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self.optimizer.param_groups]

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because the gradient was not finite on some rank."""
        return self._step.skipped

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
        self._require_open()
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
        self._require_open()

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
        self._require_between_steps("set_train_batch_size()")
        self._micro_batches.set_train_batch_size(train_batch_size, self.world_size, steps=self.global_steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples in a micro-batch of one rank, and so the number of samples in a step.

        The call is possible between two steps. The user's loader has to give batches of this size. Every rank must call
        it alike.

        Raises:
            ValueError: the size is not positive.
        """
        self._require_between_steps("set_train_micro_batch_size()")
        self._micro_batches.set_micro_batch_size(micro_batch_size, self.world_size)

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` has updated the parameters.

        The result is False if the call ended a micro-batch that was not the last of its step, or if the step was
        skipped because the gradient was not finite.
        """
        return self._was_step_applied

    def was_step_skipped(self) -> bool:
        """Return whether the last step was skipped, because its gradient was not finite on some rank."""
        return self._step.skipped_in_row > 0

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scaler, from which the user may read the loss scale. It must not be changed."""
        return self._scaler

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the model in place, as `module.compile` does. docs/models.md says how to compile single units."""
        arguments = dict(compile_kwargs or {})
        if (warning := _warning_of_graphs(self.device, arguments.get("mode"))) is not None:
            log.warning("%s", warning)
        self.module.compile(backend=backend, **arguments)

    def destroy(self) -> None:
        """Close the engine, as `close` does."""
        self.close()

    # The methods below do not exist in DeepSpeed's engine.

    def give_up_model(self) -> None:
        """Make the model a plain torch module with uninitialised parameters, between two steps.

        The parameters are then on the CPU, in the dtype that they have. The other ranks do not have to call this.
        Afterwards the engine cannot train any more, and every rank still has to call `close`. Committed steps stay in
        the store.
        """
        self._require_between_steps("the end of the engine's use of its model")
        self._was_taken_over = True
        self._leave_model(self._hooks.give_up_model)

    def _leave_model(self, leave: Callable[[], None]) -> None:
        """Undo what the engine has changed in the model, so that the model is a plain torch module again.

        `leave` removes the hooks and gives the parameters plain memory: `give_up_model` or `leave_model` of the hooks.
        """
        if self._has_model:
            self._has_model = False
            leave()
            self._tiling.remove()
            self._refusals.remove()
            self._pickles.remove()
            disown(self._parameters_of_model)

    def hand_over_model(self) -> None:
        """Make the model a plain torch module with its present weights, and close the engine. All ranks must call this.

        The parameters are then whole, on the CPU, in the dtype that they have.

        Raises:
            RuntimeError: a step is under way, at stage 3.
        """
        if self.global_rank == 0:
            log.warning(
                "the model of job %s is taken over at step %d by a later initialize(), so this engine is closed",
                self._settings.paramserver.job,
                self.global_steps,
            )
        if self._is_sharded:
            self._require_between_steps("the end of the engine's use of its model")
            weights = self.full_state_dict()
            self._leave_model(self._hooks.give_up_model)
            with torch.no_grad():
                for parameter in self._parameters_of_model:
                    parameter.tensor.copy_(weights.pop(parameter.fqn))
        self.close()
        self._was_taken_over = True
        self.module.cpu()

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed."""
        return self._closed

    @property
    def data_plane(self) -> str:
        """The way in which tensors pass between store and rank: "arena" (shared memory) or "streams" (gRPC)."""
        return self._store.plane.name

    @property
    def daemon_restarts(self) -> Sequence[Restart]:
        """The restarts of the store daemon after which this rank has gone on training."""
        return self._store.restarts

    def placement(self) -> dict[str, dict[str, int]]:
        """Return where this rank's state lives.

        Returns:
            For "parameters", "gradients" and "optimizer" (master weights and optimizer states), the bytes in each home
            ("device", "host", "nvme").
        """
        return placement_bytes(self._states)

    def step_report(self) -> StepReport | None:
        """Return how this rank spent the time of the last step, and how far the step was from the roofline.

        Return None before the first step. The other ranks do not have to call this. The call waits for the store's
        answer to one small RPC.
        """
        return self._reporter.last()

    # The methods below close the engine.

    def close(self) -> None:
        """Commit the last step, wait for the other ranks, leave the job, and stop the daemon if the run started it.

        At stages 0 to 2 the model is afterwards a plain torch module with its weights, on the device. At stage 3 the
        model has no weights afterwards, because they are in the store.

        A repeated call has no effect, and a step that is committed already is not committed again. All ranks must call
        this, because a rank that leaves early could stop the daemon while other ranks still read from it. In a forked
        child of the rank's process the call has no effect.
        """
        if self._closed or not self._process.is_here:
            return
        try:
            self.reload_states()
            if self._hooks.phase not in (Phase.STEP, Phase.FAILED):
                self._commits.commit_last_step()
                self._commits.wait()
                self._meet()
        finally:
            self.close_without_commit()

    def close_without_commit(self) -> None:
        """Close the engine after a run that may have failed.

        The call begins no commit. It waits for the commit that is under way at this rank's store, and not for other
        ranks. A repeated call has no effect.
        """
        if self._closed or not self._process.is_here:
            return
        self._closed = True
        at_exit.unregister(self)
        self._remains.close_no_more()
        was_interrupted = _is_interrupted()
        self._store.stop_reattaching()
        self._hooks.stop_watching_gradients()
        self._refusals.allow_changes()
        try:
            with self._resources:
                self._commits.wait()
        except KeyboardInterrupt:
            # If a first Ctrl-C is ending the program already, a second one ends only the wait for the commit, and is
            # not raised.
            if not was_interrupted:
                raise
            log.warning("paramserver: interrupted again, so the engine does not wait; committed steps are in the store")
        finally:
            if not self._is_sharded:
                self._leave_model(self._hooks.leave_model)

    def _meet(self) -> None:
        """Commit what the script has changed since the last step, and wait for the other ranks.

        All ranks must call this. If another rank has failed or gone, this rank only logs a warning.
        """
        try:
            self._commit_changes_of_script()
            self._commits.wait()
            self._collectives.barrier("the end of the run")
            self._commits.record_settled()
        except CollectiveError as error:
            # At a failure of another rank no step is lost, because the last step was committed on all nodes before.
            log.warning("leaving without the other ranks: %s", error)

    # The methods below let the engine behave as a torch module and as a context.

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Return the engine if `fn` would change no tensor of the model; else raise RuntimeError."""
        return refuse_conversion(self, fn, recurse)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise RuntimeError, because a copy of the engine would have no session with the store."""
        raise RuntimeError(
            "an engine cannot be pickled or copied: save or copy engine.module (at stage 3 within "
            "engine.gathered(engine.module)), or call engine.save_checkpoint()"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._close_after_failure()

    def _close_after_failure(self) -> None:
        """Close the engine as `close_without_commit` does, but log an error of the store instead of raising it."""
        try:
            self.close_without_commit()
        except TrainerClientError as failure:
            # If the session has ended, as after a long pause of this process, training raises an error and `close`
            # raises another one. The traceback of the first error is enough, so that of the second goes to the debug
            # log.
            log.warning("closing the engine failed too: %s", failure)
            log.debug("closing the engine failed too", exc_info=True)

    def _report(self) -> None:
        """Begin the report of the step. At each `steps_per_print`-th step, rank 0 also logs a line about the step."""
        line = None
        every = self._settings.steps_per_print
        if self._collectives.rank == 0 and every and self.global_steps % every == 0:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            shown = (self.global_steps, self.skipped_steps, rates, self._step.gradient_norm)

            def line(report: StepReport) -> None:
                log.info("step=%d skipped=%d lr=%s norm=%s %s", *shown, report)

        self._reporter.end_step(self.global_steps, line)
        self._log_context.step = self.global_steps + 1


def _is_interrupted() -> bool:
    """Return whether Ctrl-C is ending the program: KeyboardInterrupt is being handled, or no handler caught it."""
    return isinstance(sys.exception() or getattr(sys, "last_value", None), KeyboardInterrupt)


def _require_limit(what: str, limit: float) -> None:
    """Check the limit of a call that clips gradients. Raise ValueError if it is not positive."""
    if not limit > 0:
        raise ValueError(f"{what}({limit}): write a positive limit, or leave the call out so that nothing is clipped")


def _warning_of_graphs(device: torch.device, mode: object) -> str | None:
    """Return a warning if a mode of torch.compile records CUDA graphs, which gathers invalidate; otherwise None."""
    if device.type == CPU or mode not in _RECORDING_MODES:
        return None
    return (
        f"engine.compile(compile_kwargs={{'mode': {mode!r}}}) records CUDA graphs, again after each gather, because a "
        "unit has another address then: use 'max-autotune-no-cudagraphs', or leave mode out"
    )
