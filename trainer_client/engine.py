"""The engine: DeepSpeed's verbs over a model whose state lives in the store.

Owns the count of steps, the order of a step, and the client state that each commit carries. Must never communicate on
its own: collectives, leases and hooks each have a module below.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, Unpack

import torch
from torch import nn

from trainer_client.access import ParameterKey, StateAccess, StateDictNames, StateShard, disown, own
from trainer_client.engine_getters import EngineGetters
from trainer_client.errors import (
    CollectiveError,
    ConfigError,
    NonFiniteGradientError,
    NotScalarError,
    PhaseError,
    TrainerClientError,
)
from trainer_client.exchange.export import Format, FormatOptions, PendingExport, begin_export
from trainer_client.model.gather import Gather
from trainer_client.model.placement import Residence
from trainer_client.model.released import ReleasedParameter
from trainer_client.model.states import PlacedStates, placement_bytes
from trainer_client.report.reporter import Reporter
from trainer_client.report.step_report import StepReport
from trainer_client.run.backward_passes import BackwardPasses
from trainer_client.run.checkpoints import Checkpoints
from trainer_client.run.commits import Commits
from trainer_client.run.context import RankContext, UserObjects
from trainer_client.run.micro_batches import MicroBatches
from trainer_client.run.run_state import Progress, RunState
from trainer_client.run.state_offload import DeviceState, StateOffload
from trainer_client.step.hooks import UnitHooks
from trainer_client.step.phases import Phase
from trainer_client.step.precision import LossScaler, PrecisionPolicy
from trainer_client.step.training_step import TrainingStep
from trainer_client.transport.attachments import Restart

log = logging.getLogger(__name__)

# The beginning of the names that the engine, as a module, gives to the model's parameters.
_PREFIX = "module."


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The objects that an engine calls, made by assembly.py.

    Attributes:
        states: the states of all groups.
        gather: how the units' parameters come together.
    """

    states: Sequence[PlacedStates]
    gather: Gather
    micro_batches: MicroBatches
    hooks: UnitHooks
    step: TrainingStep
    scaler: LossScaler
    access: StateAccess
    commits: Commits
    passes: BackwardPasses
    run_state: RunState
    checkpoints: Checkpoints
    offload: StateOffload
    reporter: Reporter


class Engine(EngineGetters):
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
        global_steps: the number of steps made or skipped, which is the number of the job's newest step.
        global_samples: the number of samples in these steps.
        resumed_step: the global step that the run started from; 0 for a new job.
        client_state: the user's own values (JSON-like, tensors too), for example a data cursor. They are committed with
            each step, and restored on a resume. Set them before the `step()` that they belong to.
    """

    def __init__(self, user: UserObjects, rank: RankContext, parts: EngineParts, resources: ExitStack) -> None:
        """Join the parts to an engine.

        Args:
            resources: closed when the engine leaves.
        """
        super().__init__()
        self.module = user.module
        self.training = user.module.training
        self.optimizer = user.optimizer
        self.lr_scheduler = user.lr_scheduler
        self.global_steps = 0
        self.global_samples = 0
        self.resumed_step = 0
        self.client_state: dict[str, Any] = {}
        self.local_rank = rank.local_rank
        self.device = rank.collectives.device
        self._settings = rank.settings
        self._precision = PrecisionPolicy.of(rank.settings)
        self._store = rank.store
        self._collectives = rank.collectives
        self._states = parts.states
        self._step = parts.step
        self._hooks = parts.hooks
        self._gather = parts.gather
        self._access = parts.access
        self._commits = parts.commits
        self._passes = parts.passes
        self._scaler = parts.scaler
        self._run_state = parts.run_state
        self._checkpoints = parts.checkpoints
        self._micro_batches = parts.micro_batches
        self._reporter = parts.reporter
        self._offload = parts.offload
        self._resources = resources
        self._closed = False
        self._was_step_applied = False
        # Whether this rank may change all parameters of the model, within `gathered`.
        self._is_modifier = False
        # The model's refusals of calls that would not reach the store.
        refuse_load = partial(_refuse_load, weakref.ref(self))
        self._refusals = [user.module.register_load_state_dict_pre_hook(refuse_load)]
        if any(state.placement.residence is Residence.SHARDED for state in parts.states):
            self._refusals.append(user.module.register_state_dict_pre_hook(_refuse_state_dict))
            self._refusals.append(user.module.register_state_dict_post_hook(_copy_gathered))
        self._parameters_of_model = user.parameters
        self._has_model = True
        own(user.parameters, self)
        user.optimizer.drive(self)
        atexit.register(self.close_without_commit)
        if rank.collectives.rank == 0:
            log.info("placement, bytes of each rank: %s", self.placement())

    @property
    def micro_steps(self) -> int:
        """The number of calls of `step`, one per micro-batch."""
        return self._micro_batches.micro_steps

    # DeepSpeed's verbs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, and return its output. Floating-point inputs are cast to the compute dtype.

        With `torch_autocast` in the config, the forward runs under `torch.autocast`.
        """
        self._require_open()
        self._hooks.expect_forward()
        try:
            with self._precision.autocast(self.device):
                return self.module(*args, **kwargs)
        except BaseException:
            self._hooks.fail_forward()
            raise

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run the backward pass of a micro-batch. A collective.

        The loss is divided by the accumulation steps and multiplied by the loss scale. A step may have several backward
        passes per micro-batch, whose gradients add up. The user may also call `loss.backward()`, or
        `output.backward(gradient)` for an output that is no scalar.

        Args:
            loss: 0-D, the mean loss over this rank's micro-batch.
            scale_wrt_gas: False: the loss is not divided by the accumulation steps.

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
            self._hooks.begin_backward(plan)
            with self._passes.multiplied(self._scaler.scale / divisor):
                torch.autograd.backward(scaled, retain_graph=retain_graph)
            self._hooks.finish_backward()
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
        """Check that the user's `loss.backward()` has ended well. Its gradients are reduced by then.

        DeepSpeed's documentation tells scripts for versions before 0.18.3 to call this name on each engine, after the
        backward pass of one loss of several engines.

        Raises:
            PhaseError: the backward pass has failed.
        """
        self._require_open()

    def _fail_backward(self, error: BaseException) -> None:
        """Give up the step and leave the other ranks, if a backward pass was under way, because it has failed."""
        if self._hooks.abort_backward():
            self._step.abandon()
            self._abandon_run("a backward pass", error)

    def step(self) -> None:
        """End a micro-batch. At the accumulation boundary, make a step and commit it. A collective.

        Returns when the store has the gradients, and when the parameters and optimizer states that live on the device
        are updated. The store goes on with its updates and with the commit; if they fail, the next step,
        `wait_for_commit` or `close` raises the error. A step with a non-finite gradient is skipped on every rank.

        Raises:
            ConfigError: a parameter group or a parameter was changed so that no step can be made; none was begun.
            UnusedParameterError: `zero_optimization.ignore_unused_parameters` is false, and no rank has a gradient of
                some parameter.
            NonFiniteGradientError: `paramserver.max_consecutive_skipped_steps` steps in a row were skipped.
            StoreError: the store failed; the last committed step is intact.
        """
        self._require_open()
        if self._access.is_holding:
            raise RuntimeError("step() within gathered(): leave it first, the step changes the parameters")
        if self._micro_batches.backwards == 0:
            raise RuntimeError("step() without backward(): there is no gradient")
        boundary = self._micro_batches.is_last
        if boundary and not self._micro_batches.syncs:
            raise RuntimeError(
                "step() of the last micro-batch within no_sync() or coalesce_grad_reduction(): leave it first, a step "
                "communicates"
            )
        if boundary:
            self.optimizer.check_groups()
        self._was_step_applied = False
        self._micro_batches.end()
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
        if self._step.skipped_in_row == self._settings.paramserver.max_consecutive_skipped_steps:
            raise NonFiniteGradientError(
                f"the gradients of {self._step.skipped_in_row} steps in a row, up to step {self.global_steps}, are not "
                "finite (paramserver.max_consecutive_skipped_steps): look at the data and the learning rate; the "
                "states are those before these steps"
            )

    def _make_step(self) -> None:
        """Make or skip the step, and begin its commit. A collective."""
        # Every rank waits for the last commit before it takes part in the norm. So after the norm, the last step is
        # committed on every rank.
        self.wait_for_commit()
        made = self._was_step_applied = self._step.make(self._commits.next)
        self.global_steps += 1
        self.global_samples += self._micro_batches.samples
        self._micro_batches.end_step()
        if not made:
            log.warning("step %d is skipped: its gradient norm is %s", self.global_steps, self._step.gradient_norm)
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()
        # The commit begins after the scheduler has stepped, so that a resume starts with the learning rate that an
        # uninterrupted run has.
        self._commits.end_step(self.global_steps, self._client_state)
        if self._gather.is_one_sided:
            self._collectives.barrier()
        self._step.refresh()
        self._hooks.finish_step()

    def register_external_parameter(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather `parameter`, which belongs to another module, together with `module` from now on.

        This is never necessary, because the engine notices the use of a parameter, but it saves torch.compile a cut in
        the graph of `module`. DeepSpeed has the same function in `deepspeed.zero`.

        Raises:
            ConfigError: the module or the parameter is not part of this engine's model.
        """
        self._hooks.register_external_parameter(module, parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of backward passes that no `step` has followed. Every rank must call it alike.

        A step drops its gradients itself, so that a loop needs no call. With more than one micro-batch in a step the
        call has no effect, as with DeepSpeed: the gradients of the earlier micro-batches stay. (If the config says
        `managed_gradient_accumulation: false`, the call always drops them.)

        Args:
            set_to_none: has no effect: a gradient is always dropped, never set to zero.
        """
        self._require_open()
        if self._micro_batches.backwards and not self._micro_batches.keeps_gradients:
            self._step.drop_gradients()
            self._micro_batches.drop_backwards()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradient of the step under way by its 2-norm when the step is made. A collective.

        This counts in place of the config's `gradient_clipping`, for this step alone. Call it after the last backward
        pass of the step, as `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm over all ranks before clipping, without the loss scale. If it is not finite, the step is skipped.

        Raises:
            RuntimeError: there is no gradient, or it is not reduced over the ranks yet (within `no_sync`).
        """
        self._require_gradient("clip_grad_norm_()")
        return self._step.clip_by_norm(self._commits.next, max_norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip each element of the gradient of the step under way when the step is made, as `clip_grad_norm_` does.

        Raises:
            RuntimeError: there is no gradient, or it is not reduced over the ranks yet (within `no_sync`).
        """
        self._require_gradient("clip_grad_value_()")
        self._step.clip_by_value(clip_value)

    def _require_gradient(self, what: str) -> None:
        """Raise RuntimeError unless a whole step's gradient is there, because `what` needs it."""
        self._require_open()
        if self._micro_batches.backwards == 0:
            raise RuntimeError(f"{what} without backward(): there is no gradient")
        if not (self._micro_batches.is_last and self._micro_batches.syncs):
            raise RuntimeError(f"{what} before the last micro-batch of a step: call it just before step()")

    def get_global_grad_norm(self) -> float | None:
        """Return the 2-norm of the last step's gradient over all ranks, before clipping; None before the first step.

        Without clipping by norm, the norm of bf16 gradients on the CPU is rounded: it is right within 0.1 %.
        """
        return self._step.gradient_norm

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
        """Keep backward passes within the context from communicating, at any stage. Every rank must enter it alike.

        As with DDP's `no_sync`, their gradients stay whole on each rank's device until the next backward pass outside
        of the context, or until the step.
        """
        with self._micro_batches.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backward passes within the context once, at its end. A collective.

        For steps of many backward passes, at any stage. `step` follows the context. Within it the gradients stay whole
        on each rank's device, as within `no_sync`. If the context ends by an error, nothing is reduced.

        Raises:
            RuntimeError: the context is within `no_sync` or within another one of its kind.
        """
        self._require_open()
        if not self._micro_batches.syncs:
            raise RuntimeError(
                "coalesce_grad_reduction() within no_sync(), or within another coalesce_grad_reduction(): leave it "
                "first, because the end of the context reduces gradients"
            )
        with self._micro_batches.no_sync():
            yield
        if self._micro_batches.backwards:
            self._step.reduce_gradients(self._commits.next)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the micro-batch under way is the last of its step, until the next call; None: the config says.

        Call this before the micro-batch's `backward`, on every rank alike.
        """
        self._micro_batches.set_last(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step` makes a step."""
        return self._micro_batches.is_last

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples in a step of all ranks, by the number of micro-batches in it, between two steps.

        Every rank must call it alike. A resume has the batch size of its config again.

        Raises:
            ValueError: the size is not a multiple of the samples that the ranks have in one micro-batch each.
        """
        self._require_between_steps("set_train_batch_size()")
        self._micro_batches.set_train_batch_size(train_batch_size, self.world_size, steps=self.global_steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples in a micro-batch of one rank, and with it that of a step, between two steps.

        The user's loader has to give batches of this size. Every rank must call it alike.

        Raises:
            ValueError: the size is not positive.
        """
        self._require_between_steps("set_train_micro_batch_size()")
        self._micro_batches.set_micro_batch_size(micro_batch_size, self.world_size)

    def was_step_applied(self) -> bool:
        """Return whether the last call of `step` has updated the parameters.

        It has not between the micro-batches of a step, and if the gradient was not finite.
        """
        return self._was_step_applied

    def was_step_skipped(self) -> bool:
        """Return whether the last step was skipped, because its gradient was not finite on some rank."""
        return self._step.skipped_in_row > 0

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale, for reading."""
        return self._scaler

    def empty_partition_cache(self) -> None:
        """Release the memory of gathered parameters between two steps. The next forward gathers them again.

        Within a step the call has no effect, because the backward pass needs what is still gathered.
        """
        self._require_open()
        if self._micro_batches.backwards == 0 and self._hooks.phase is Phase.IDLE:
            self._hooks.release_units()

    def offload_states(
        self,
        include: Container[DeviceState] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from this rank's device into host memory, to leave the device to another program for a while.

        Until `reload_states`, every other call but `close` raises PhaseError, and so does the model's forward. What the
        store has anyway does not move. On the CPU, the call makes a copy all the same.

        Args:
            include: the kinds of state, as `OffloadStateTypeEnum`; None: all.
            device: only "cpu" is possible.
            pin_memory: whether to page-lock the copies.
            non_blocking: whether to return before the copies are complete; page-locked ones only.

        Raises:
            ConfigError: another device was given.
            PhaseError: a forward waits for its backward, or a pass or a step is under way.
            RuntimeError: the engine is closed, or parameters are held by `gathered`.
        """
        if str(device) != "cpu":
            raise ConfigError(f"offload_states(device={str(device)!r}): states can be moved to 'cpu' only")
        if self._hooks.phase is not Phase.OFFLOADED:
            self._require_open()
        if self._access.is_holding:
            raise RuntimeError("offload_states() within gathered(): leave it first")
        # The commit under way may still read what the device has.
        self.wait_for_commit()
        self._hooks.begin_offload()
        which: Container[DeviceState] = list(DeviceState) if include is None else include
        try:
            self._offload.offload(which, pinned=pin_memory, non_blocking=non_blocking)
        except BaseException:
            self._hooks.end_offload()
            raise

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states that `offload_states` has moved back to the device. Without effect if there are none."""
        if self._hooks.phase is Phase.OFFLOADED:
            self._offload.reload(non_blocking=non_blocking)
            self._hooks.end_offload()

    def state_devices(self, state: DeviceState) -> set[torch.device]:
        """Return the devices that have a kind of state of this rank; memory and files of the store are the CPU's."""
        return self._offload.devices_of(state)

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the model in place, as `module.compile` does. To compile its units instead, see docs/models.md."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def destroy(self) -> None:
        """Close the engine, as `close` does."""
        self.close()

    # Functions that DeepSpeed does not have

    def give_up_model(self) -> None:
        """Make the model a plain one, between two steps.

        Its parameters are uninitialised then, on the CPU, in the dtype that they have. Not a collective. The engine can
        only be closed afterwards, which every rank has to do, as ever. What is committed stays in the store.
        """
        self._require_between_steps("the end of the engine's use of its model")
        self._hooks.give_up_model()
        for refusal in self._refusals:
            refusal.remove()
        disown(self._parameters_of_model)
        self._has_model = False

    @property
    def data_plane(self) -> str:
        """The way of tensor bytes to this rank: "arena" (shared memory) or "streams" (gRPC)."""
        return self._store.plane.name

    @property
    def daemon_restarts(self) -> Sequence[Restart]:
        """The restarts of the store daemon that this rank has outlived."""
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

        Returns None before the first step. Not a collective. Waits for the store's answer to a small question.
        """
        return self._reporter.last()

    def wait_for_commit(self) -> None:
        """Wait until the newest commit is as durable as the job's durability class says. Raises StoreError."""
        self._commits.wait()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Return the model's state by name, on the CPU: fp32 (master) weights, and buffers as they are. A collective.

        The same model outside of the engine can load the dict with `strict=True`.

        Args:
            rank0_only: whether only rank 0 gets the state. The other ranks take part, and get an empty dict.
        """
        self._require_open()
        return self._access.full_state_dict(keep=not rank0_only or self._collectives.rank == 0)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> StateDictNames:
        """Set the model's weights and buffers, between two steps, in a commit of their own. A collective.

        Optimizer states stay as they are. Every rank must give the same values.

        Args:
            state_dict: values by name, as `full_state_dict` or the model's `state_dict` returned them, in any
                floating-point dtype; the prefix "module." of all names may be there.
            strict: whether the names must be those of the model.
            assign: only False is possible, because parameters keep their memory.

        Returns:
            `missing_keys` and `unexpected_keys`, as torch does.

        Raises:
            RuntimeError: the names are not those of the model, or a step is under way; nothing was changed.
            ConfigError: a shape does not fit, or `assign` was given.
        """
        if assign:
            raise ConfigError("load_state_dict(assign=True): the engine's parameters keep their memory; leave it out")
        self._require_between_steps("load_state_dict()")
        if state_dict and all(name.startswith(_PREFIX) for name in state_dict):
            state_dict = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        found = self._access.compare_names(state_dict)
        if strict and (found.missing_keys or found.unexpected_keys):
            raise RuntimeError(
                f"load_state_dict(): missing are {', '.join(found.missing_keys) or 'none'}; unexpected are "
                f"{', '.join(found.unexpected_keys) or 'none'}: give the model's own state, or strict=False"
            )
        changes = self._access.weight_changes(state_dict)
        with self._changing():
            self._access.set_buffers(state_dict)
            self._access.hand_over(changes, self._commits.next)
            self._commit_change()
        return found

    def export(
        self, format: Format, destination: str | os.PathLike[str], **options: Unpack[FormatOptions]
    ) -> PendingExport | None:
        """Begin to write the newest committed step as files of another framework, beside the training. A collective.

        Returns when the store holds the step for the export, which is after its commit. Then rank 0 writes on a thread
        of its own, from the store, while training goes on: what is written is that step. `close` waits for it.

        Args:
            format: as for `trainer_client.exchange.export.export_step`, like all arguments.
            destination: a directory that does not exist, or a URL of one that fsspec knows.
            options: further arguments of `export_step`, such as `dtype`, `optimizer` and `adapter`.

        Returns:
            The futures of the export on rank 0: `staged` with the number of the step, which is done, and `persisted`
            with the result. None on the other ranks.

        Raises:
            ConfigError: an argument is malformed, or does not go with the format; on rank 0.
            ExportError: the destination exists or cannot be written; on rank 0.
            StoreError: the store failed; on rank 0.
        """
        self._require_between_steps("an export")
        self.wait_for_commit()
        stores = [address.decode() for address in self._collectives.gather_bytes(self._store.address.encode())]
        pending = None
        try:
            if self._collectives.rank == 0:
                options.setdefault("credentials", self._store.credentials)
                job, step = self._settings.paramserver.job, self._commits.newest
                pending = begin_export(list(dict.fromkeys(stores)), job, step, destination, format=format, **options)
                # The run's own daemon is stopped when the engine leaves, so the engine waits for the export.
                self._resources.callback(wait, [pending.persisted])
                pending.staged.result()
        finally:
            # The other ranks make no further step before the store holds this one.
            self._collectives.barrier("an export")
        return pending

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights as forward computes with them to a file that `torch.load` reads. A collective.

        Rank 0 writes, and needs host memory for all of these weights. Tied names share one tensor in the file. The file
        is complete when it appears, because it is renamed at the end.

        Args:
            save_dir: directory of the file, made if need be.

        Returns:
            True.

        Raises:
            OSError, RuntimeError: rank 0 could not write the file; OSError on rank 0, RuntimeError on the others.
        """
        self._require_open()
        weights = self._access.parameter_state_dict(
            keep=self._collectives.rank == 0, with_frozen=not exclude_frozen_parameters
        )
        failure: OSError | None = None
        if self._collectives.rank == 0:
            try:
                _save(weights, Path(save_dir) / save_filename)
            except OSError as error:
                failure = error
        (has_failed,) = self._collectives.any_rank([failure is not None], "save_16bit_model()")
        if has_failed:
            raise failure or RuntimeError("save_16bit_model(): rank 0 could not write the file; see its message")
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the weights as forward computes with them on rank 0, and None on the others. A collective.

        Accelerate and the Trainer of transformers call this name of DeepSpeed's to save the model.
        """
        self._require_open()
        keep = self._collectives.rank == 0
        weights = self._access.parameter_state_dict(keep=keep, with_frozen=not exclude_frozen_parameters)
        return weights if keep else None

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        metric: float | None = None,
    ) -> bool:
        """Keep the present step in the store, and write a manifest of it to `save_dir/tag`. A collective.

        Nothing is copied: the store keeps the bytes that it has of the step, until the checkpoint is removed by the
        retention of the config (`paramserver.checkpoints`), or forgotten. The manifest appears when it is complete.

        Between the micro-batches of a step, the checkpoint has the state at the end of the last step, and no gradients:
        a run that loads it begins the step anew.

        Args:
            save_dir: directory of the checkpoints, made if need be. Rank 0 writes there. "" and None are refused.
            tag: name of the checkpoint's directory; None: `global_step` and the number of the step. A checkpoint of the
                same tag is replaced.
            client_state: this rank's own values, which `load_checkpoint` returns to it. JSON-like values and tensors,
                or whatever `torch.load(weights_only=True)` reads.
            save_latest: whether the file `latest` in `save_dir` is to name this checkpoint.
            exclude_frozen_parameters: has no effect, because frozen parameters are not copied either.
            metric: a measure of the step, for `paramserver.checkpoints.keep_best`.

        Returns:
            True.

        Raises:
            CheckpointError, StoreError, OSError: the checkpoint could not be saved; StoreBudgetError: the store has no
                room to keep the step beside those to come. No committed step is lost, and training can go on.
            ConfigError: `save_dir` names no directory.
            PhaseError: a backward pass or a step is under way.
        """
        if not save_dir:
            raise ConfigError(f"save_checkpoint(save_dir={save_dir!r}): name the directory of the checkpoints")
        self._require_open()
        if self._commits.is_behind:
            self._commits.begin(self._client_state())
        self._commits.wait()
        step = self._commits.newest
        assert step is not None, "initialize() commits the initial values"
        self._checkpoints.save(
            save_dir,
            f"global_step{self.global_steps}" if tag is None else str(tag),
            step=step,
            global_steps=self.global_steps,
            run_state=self._client_state(),
            user_state=client_state,
            metric=None if metric is None else float(metric),
            save_latest=save_latest,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint that `save_checkpoint` has saved. A collective.

        The values of its step become a new commit of this job, so that later checkpoints stay. The checkpoint may be of
        another job and of another number of ranks. With all that is loaded by default, the next steps have the bits of
        those that followed the save: the count of steps, schedules, the loss scale, random generators and the cursor
        of the data are those of the save, too.

        Args:
            load_dir: directory of the checkpoints; rank 0 reads there.
            tag: name of the checkpoint's directory; None: what the file `latest` names.
            load_module_strict: whether the model must have exactly the parameters of the checkpoint. If not, what fits
                in name and shape is loaded.
            load_optimizer_states: False: optimizer states, their counts and the loss scale stay as they are.
            load_lr_scheduler_states: False: the schedule stays as it is.
            load_module_only: whether nothing but weights and buffers is loaded.
            custom_load_fn: only None is possible, because the values go from the store into the store.

        Returns:
            The path of the checkpoint's manifest, and the `client_state` of this rank's `save_checkpoint`; a rank that
            did not save gets that of rank 0. (None, None), and a warning, if `tag` is None and there is no `latest`.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged, or no store keeps its step any more.
            OtherModelError: the checkpoint is of a model with other parameters.
            ConfigError: `custom_load_fn` was given.
            RuntimeError: a step is under way.
        """
        self._require_between_steps("load_checkpoint()")
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...): the store gives the values to the store, and no module gets them "
                "on the way; leave it out, and change weights with engine.load_state_dict()"
            )
        tag = None if tag is None else str(tag)
        loaded = self._checkpoints.find(load_dir, tag, strict=load_module_strict)
        if loaded is None:
            return None, None
        with self._changing():
            self._checkpoints.hand_over(
                loaded, self._commits.next, with_states=load_optimizer_states and not load_module_only
            )
            if not load_module_only:
                progress = self._run_state.restore(
                    loaded.run_state, optimizer=load_optimizer_states, lr_scheduler=load_lr_scheduler_states
                )
                self._go_on_from(progress, loaded.run_state["user"])
            self._commit_change()
        if self._collectives.rank == 0:
            log.info("loaded %s: the next step is %d", loaded.path, self.global_steps + 1)
        return loaded.path, loaded.client_state

    # These methods read and change the states of single parameters.

    def is_trained(self, parameter: ParameterKey) -> bool:
        """Return whether a parameter is trained, or was trained before it was frozen. Raises ConfigError.

        A frozen parameter in a parameter group has states, too, because it may be trained later; they are zero.
        """
        found = self._access.parameter(parameter)
        counts = self._step.update_counts
        return self.optimizer.has_states(found) and (found.tensor.requires_grad or counts[found.index] > 0)

    def get_full(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return the whole values of one kind of a parameter, on the CPU, wherever they live. A collective.

        Args:
            parameter: the parameter, or its FQN.
            kind: "param" (the values that forward computes with, in their dtype), "master" (the fp32 weight), "grad"
                (between backward and step: the mean, or the sum, over ranks so far, not scaled), or a state of the
                optimizer by torch's name, as "exp_avg". All but "param" are fp32. A gradient that the ranks have not
                reduced yet (within `no_sync`, or before the last backward of a step in which only that one reduces) is
                reduced for this call alone.

        Returns:
            The values in the parameter's shape. None for "grad" if no rank has a gradient in this step.

        Raises:
            ConfigError: there is no such parameter or kind.
        """
        self._require_open()
        return self._access.full(parameter, kind)

    def get_local(self, parameter: ParameterKey, kind: str) -> torch.Tensor | None:
        """Return this rank's part of one kind of a parameter: [n] of the flattened parameter; n may be 0.

        As `get_full`, but not a collective. For a gradient that no rank has, None or zeros are returned.

        Raises:
            ConfigError: there is no such parameter or kind.
            RuntimeError: gradients are not reduced over the ranks yet (within `no_sync`, or before the last backward of
                a step in which only that one reduces).
        """
        self._require_open()
        return self._access.local(parameter, kind)

    def set_full(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """Change one kind of a parameter, on all ranks. A collective, to which every rank passes the same value.

        "param" and "master" are one weight and change together. A gradient can be changed between backward and step.
        All other kinds can be changed wherever no forward waits for its backward, as a commit of its own: after a
        resume, either the whole change is there or nothing of it. Gradients that are there stay, so a step after
        backward and the change updates the new values. `set_many` makes several changes in one commit.

        Args:
            value: the new values in the parameter's shape, of any dtype and on any device.

        Raises:
            ConfigError: there is no such parameter or kind, or the shape does not fit.
            RuntimeError: the kind cannot be changed at this point of the training loop.
        """
        self._set({(parameter, kind): value}, local=False)

    def set_local(self, parameter: ParameterKey, kind: str, value: torch.Tensor) -> None:
        """Change one kind of a parameter, as `set_full`.

        A collective, to which each rank passes its own part [n], as `get_local` returns it.
        """
        self._set({(parameter, kind): value}, local=True)

    def set_many(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor]) -> None:
        """Make several changes as `set_full`, by (parameter, kind), in one commit. A collective."""
        self._set(values, local=False)

    def sharded_state_dict(self, kind: str = "master") -> dict[str, StateShard]:
        """Return this rank's part of one kind of all parameters that have it, by FQN, tied names included.

        Not a collective. Each part says which elements of which parameter it has, so that the dicts of all ranks
        together are the whole state, for any number of ranks. (`full_state_dict` gathers it.)
        """
        self._require_open()
        return self._access.shards(kind)

    @contextmanager
    def gathered(
        self, parameters: nn.Module | Iterable[torch.Tensor], modifier_rank: int | None = None
    ) -> Iterator[None]:
        """Make parameters whole within the context, in the dtype of the forward, for reading. A collective.

        Their units stay gathered in the context, so forwards within it do not gather them again.

        Args:
            parameters: the parameters, or a module, for all of its parameters.
            modifier_rank: the rank that may change the parameters (in place, under torch.no_grad). At the end of the
                context all ranks get its values, as a commit of its own. An element that it does not change keeps its
                fp32 value. With all parameters, it may call the model's `load_state_dict`. None: no rank may change
                them.

        Raises:
            RuntimeError: `modifier_rank` was given between a forward and its backward.
        """
        self._require_open()
        chosen = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
        if modifier_rank is None:
            with self._access.gathered(chosen):
                yield
            return
        self._require_between_passes("gathered(modifier_rank=...)")
        before = self._access.parameters_before(chosen)
        with self._access.gathered(chosen):
            is_whole = {id(parameter) for parameter in self.parameters()} <= {id(tensor) for tensor in chosen}
            self._is_modifier = is_whole and self._collectives.rank == modifier_rank
            try:
                yield
            finally:
                self._is_modifier = False
            self._require_between_passes("the end of gathered(modifier_rank=...)")
            with self._changing():
                self._access.hand_over_changed(chosen, before, modifier_rank, self._commits.next)
        with self._changing():
            self._commit_change()

    def _set(self, values: Mapping[tuple[ParameterKey, str], torch.Tensor], *, local: bool) -> None:
        """Change gradients at once, and all other kinds in a commit of their own. A collective."""
        self._require_open()
        gradients = {parameter: value for (parameter, kind), value in values.items() if kind == "grad"}
        for parameter, value in gradients.items():
            self._access.set_gradient(parameter, value, local=local)
        states = {key: value for key, value in values.items() if key[1] != "grad"}
        if states:
            self._require_between_passes("a change of parameters or optimizer states")
            changes = self._access.changes(states, local=local)
            with self._changing():
                self._access.hand_over(changes, self._commits.next)
                self._commit_change()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Surround a change of states, and make no commit after a change that fails.

        A change that fails half-way cannot be undone, so a part of it would go into the next commit. Updates that have
        begun in the backward pass are withdrawn before the change, because they are computed from the former values.
        """
        self.wait_for_commit()
        try:
            self._step.withdraw_early_updates()
            yield
        except BaseException as error:
            self._hooks.fail_change()
            self._step.abandon()
            self._abandon_run("a change of states", error)
            raise

    def _abandon_run(self, what: str, error: BaseException) -> None:
        """Abandon the run, because this rank cannot take part in the step any more.

        The other ranks must not wait for this rank, neither in a collective nor for its vote in the store.
        """
        if self._collectives.world_size > 1:
            self._collectives.abandon(what, error)
            self._commits.abandon()
            self._store.close()

    def _commit_change(self) -> None:
        """Commit a change of states, and wait until the commit is there."""
        self._hooks.release_units()
        self._commits.begin(self._client_state())
        self._commits.wait()

    def _require_between_steps(self, what: str) -> None:
        """Raise RuntimeError unless the engine is between two steps, because `what` is possible only there."""
        self._require_open()
        if self._micro_batches.backwards or self._hooks.phase is not Phase.IDLE:
            raise RuntimeError(f"{what} is possible between two steps: after step(), before the next forward")

    def _require_between_passes(self, what: str) -> None:
        """Raise RuntimeError if a forward waits for its backward, because `what` changes the weights."""
        self._require_open()
        if self._hooks.phase is not Phase.IDLE:
            raise RuntimeError(
                f"{what} is possible where no forward waits for its backward: after backward() or step(), before the "
                "next forward"
            )

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on from a commit, which carried `state`. Called at the end of `initialize`."""
        self._go_on_from(self._run_state.restore(state), state["user"])
        self.resumed_step = self.global_steps
        self._commits.note_state(self._client_state())

    def _go_on_from(self, progress: Progress, user: dict[str, Any]) -> None:
        """Continue the engine's counts, with the user's values that belong to them."""
        self.global_steps = progress.global_steps
        self.global_samples = progress.global_samples
        self._micro_batches.go_on_from(progress.micro_steps)
        self.client_state = user

    def commit_initial_state(self) -> None:
        """Commit the states that were handed over.

        They are the initial weights, committed as step 0, or the resumed step in another layout, committed as the step
        after it.
        """
        self._commits.begin(self._client_state())
        self._commits.wait()

    def close(self) -> None:
        """Commit the last step, wait for the other ranks, leave the job, and stop the daemon that belongs to it.

        Idempotent: a step that is committed already is not committed again. A collective, because a rank that leaves
        early would take the daemon away from ranks that still read.
        """
        if self._closed:
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

        Begins no commit, waits only for the commit that is under way, and does not wait for other ranks. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close_without_commit)
        self._store.stop_reattaching()
        self._hooks.stop_watching_gradients()
        with self._resources:
            self.wait_for_commit()

    def _meet(self) -> None:
        """Wait for the other ranks at the end of the run. A collective, whose failure is only logged."""
        try:
            self._collectives.barrier("the end of the run")
        except CollectiveError as error:
            # All steps are committed, so this rank loses nothing if another one has failed or gone.
            log.warning("leaving without the other ranks: %s", error)

    # The behaviour of a module

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model, because the engine has none of this name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        return getattr(self.module, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Return the engine if `fn`, as `to`, `half` or `cuda` make it, would change no tensor; refuse it if it would.

        Raises:
            RuntimeError: `fn` gives tensors another device or dtype than the config has given them.
        """
        for tensor in (*self.parameters(), *self.buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise RuntimeError(
                    f"the engine's tensors cannot be converted from {probe.dtype} on {probe.device} to {moved.dtype} "
                    f"on {moved.device}: the dtype follows from bf16.enabled and fp16.enabled of the config, and the "
                    "device from the rank; remove the call"
                )
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close_without_commit()
        except TrainerClientError:
            log.exception("closing the engine failed too")

    def _client_state(self) -> bytes:
        """Return what the next commit carries for this rank: the state at the end of the last step.

        Where a step is under way, this is the state that it began with, because a run that goes on from the commit
        begins the step anew. If that was not encoded, the generators and buffers are those of this moment.
        """
        is_within_step = self._micro_batches.backwards > 0 or self._hooks.phase is Phase.FORWARD
        if is_within_step and (state := self._commits.state_of_last_step) is not None:
            return state
        progress = Progress(
            global_steps=self.global_steps,
            global_samples=self.global_samples,
            micro_steps=self._micro_batches.micro_steps_of_steps,
        )
        return self._run_state.encode(progress, self.client_state)

    def _report(self) -> None:
        """Begin the report of the step, and its line in the log if it is due."""
        line = None
        every = self._settings.steps_per_print
        if self._collectives.rank == 0 and every and self.global_steps % every == 0:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            shown = (self.global_steps, self.skipped_steps, rates, self._step.gradient_norm)

            def line(report: StepReport) -> None:
                log.info("step=%d skipped=%d lr=%s norm=%s %s", *shown, report)

        self._reporter.end_step(self.global_steps, line)

    def _require_open(self) -> None:
        """Raise RuntimeError if the engine is closed, and PhaseError if it is in a phase that allows no call."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if not self._has_model:
            raise RuntimeError(
                "the engine's model was made a plain one by load_state_dict_from_zero_checkpoint(): close this engine, "
                "and call initialize() to train on"
            )
        if self._hooks.has_lost_backward:
            self._fail_backward(RuntimeError("loss.backward() has failed; see the error that it raised"))
        if self._hooks.phase in (Phase.BACKWARD, Phase.STEP, Phase.OFFLOADED, Phase.FAILED):
            raise PhaseError(f"the engine was called where it cannot be: {self._hooks.phase.value}")


def _save(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a file of `torch.save`, which appears at `path` when it is complete. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        torch.save(weights, part)
        part.replace(path)
    except RuntimeError as error:
        # torch reports a full disk so.
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def _refuse_load(engine: weakref.ref[Engine], module: nn.Module, *_: Any) -> None:
    """Refuse `module.load_state_dict()`, because the weights that are trained are those in the store.

    The rank whose changes all ranks are to get may call it, because they go to the store afterwards.
    """
    if (found := engine()) is not None and found._is_modifier:
        return
    raise RuntimeError(
        "the model's weights are in the store: call engine.load_state_dict() instead of the model's, load them before "
        "initialize(), or on the rank modifier_rank within gathered() of all parameters"
    )


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse `module.state_dict()`, because the weights are in the store, unless all of them are gathered."""
    if any(isinstance(parameter, ReleasedParameter) for parameter in module.parameters()):
        raise RuntimeError(
            "the model's weights are in the store: call engine.full_state_dict() instead of state_dict(), or call it "
            "within gathered() of all parameters"
        )


def _copy_gathered(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    """Replace the parameters in a state dict by copies, because gathered memory is freed. Tied names share a copy."""
    copies: dict[int, torch.Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
            if id(parameter) not in copies:
                copies[id(parameter)] = tensor.clone()
            state_dict[prefix + name] = copies[id(parameter)]
