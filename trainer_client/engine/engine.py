"""The engine: DeepSpeed's methods (`forward`, `backward`, `step` and others) for a model whose state is in the store.

This module owns the end of an engine. What a script does with passes, gradients, states and memory belongs to the
engine's parts in the other modules of this package, and the engine passes these calls on. This module must never call
torch.distributed or the store itself, because other modules own the collectives, the leases and the hooks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsIndex

import torch

from trainer_client.base import at_exit
from trainer_client.client.transport.attachments import Restart
from trainer_client.engine.changes import StateChanges
from trainer_client.engine.device_room import DeviceRoom
from trainer_client.engine.getters import EngineGetters
from trainer_client.engine.held_model import HeldModel
from trainer_client.engine.loop_passes import LoopPasses
from trainer_client.engine.parameter_states import ParameterStates
from trainer_client.engine.passed_on import AttributeOf, method_of
from trainer_client.engine.saved_steps import SavedSteps
from trainer_client.engine.step_gradient import StepGradient
from trainer_client.engine.training_loop import TrainingLoop
from trainer_client.engine.whole_model import WholeModel
from trainer_client.errors import TrainerClientError
from trainer_client.training.model.owners import own
from trainer_client.training.model.refusals import has_released, refuse_conversion, without_released
from trainer_client.training.report.throughput import ThroughputTimer
from trainer_client.training.run.context import Resources
from trainer_client.training.run.forgotten import Remains
from trainer_client.training.run.run_state import Scheduler
from trainer_client.training.step.phases import Phase
from trainer_client.training.step.precision import LossScaler
from trainer_client.training.store_optimizer import StoreOptimizer

log = logging.getLogger(__name__)


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
        global_steps: the number of training steps made or skipped since the job began, earlier runs included.
        global_samples: the number of samples in these steps.
        resumed_step: the global step that the run started from; 0 for a new job.
        client_state: the user's own values (JSON-like, tensors too), for example a data cursor. They are committed with
            each step, and restored on a resume. Set them before the `step()` that they belong to.
        tput_timer: DeepSpeed's counters of epochs and of samples a second.
        micro_steps: the number of calls of `step`, one per micro-batch.
        has_gradient: whether there was a backward pass since the last step whose gradients `zero_grad` has not dropped.
        skipped_steps: the number of steps that were skipped because the gradient was not finite on some rank.
        data_plane: how tensors pass between store and rank: "arena" (shared memory) or "streams" (gRPC).
        daemon_restarts: the restarts of the store daemon after which this rank has gone on training.
        loss_scaler: the user may read the loss scale from it, and must not change it.
    """

    def __init__(self, loop: TrainingLoop, changes: StateChanges, resources: Resources) -> None:
        """Make the engine of a training loop.

        Args:
            resources: the engine takes them over, and closes them when it is closed.
        """
        super().__init__()
        user, rank, parts = loop.user, loop.rank, loop.parts
        self.module = user.module
        self.training = user.module.training
        self.local_rank = rank.local_rank
        self.device = rank.collectives.device
        self._loop = loop
        self._settings = rank.settings
        self._store = rank.store
        self._collectives = rank.collectives
        self._micro_batches = parts.micro_batches
        self._hooks = parts.hooks
        self._commits = parts.commits
        self._resources = resources.all.pop_all()
        self._held_model = HeldModel(loop)
        self._passes = LoopPasses(loop, changes)
        self._step_gradient = StepGradient(loop)
        self._parameter_states = ParameterStates(loop, changes)
        self._whole_model = WholeModel(loop, changes)
        self._saved_steps = SavedSteps(loop, changes, self._resources)
        self._device_room = DeviceRoom(loop)
        own(user.parameters, self)
        user.optimizer.drive(self)
        # The hooks on the model refer to the engine, so the engine is not garbage-collected while a script keeps only
        # the model.
        parts.hooks.serve(self)
        loop.refusals.replace_zero_grad(user.module, self._drop_gradients)
        self._remains = Remains(self, resources.apart)
        at_exit.register(self, Engine._close_after_failure)

    # The attributes below are those of the loop.

    optimizer = AttributeOf[StoreOptimizer]("_loop")
    lr_scheduler = AttributeOf[Scheduler | None]("_loop")
    tput_timer = AttributeOf[ThroughputTimer]("_loop")
    global_steps = AttributeOf[int]("_loop")
    global_samples = AttributeOf[int]("_loop")
    resumed_step = AttributeOf[int]("_loop")
    client_state = AttributeOf[dict[str, Any]]("_loop")

    # The methods below are the passes and the step, with the names and meanings of DeepSpeed's engine.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, and return its output. Floating-point inputs are cast to the compute dtype.

        With `torch_autocast` in the config, the forward runs under `torch.autocast`.
        """
        return self._passes.forward(self.module, *args, **kwargs)

    backward = method_of("_passes", LoopPasses.backward)
    scale = method_of("_passes", LoopPasses.scale)
    step = method_of("_passes", LoopPasses.step)
    was_step_applied = method_of("_passes", LoopPasses.was_step_applied)
    get_lr = method_of("_passes", LoopPasses.get_lr)
    get_mom = method_of("_passes", LoopPasses.get_mom)
    loss_scaler = AttributeOf[LossScaler]("_passes")
    _backward_epilogue = method_of("_passes", LoopPasses.require_reduced_gradients)

    # The attributes and methods below are about the gradient of the step under way and its micro-batches.

    micro_steps = AttributeOf[int]("_step_gradient")
    has_gradient = AttributeOf[bool]("_step_gradient")
    skipped_steps = AttributeOf[int]("_step_gradient")
    was_step_skipped = method_of("_step_gradient", StepGradient.was_step_skipped)
    zero_grad = method_of("_step_gradient", StepGradient.zero_grad)
    clip_grad_norm_ = method_of("_step_gradient", StepGradient.clip_grad_norm_)
    clip_grad_value_ = method_of("_step_gradient", StepGradient.clip_grad_value_)
    get_global_grad_norm = method_of("_step_gradient", StepGradient.get_global_grad_norm)
    no_sync = method_of("_step_gradient", StepGradient.no_sync)
    coalesce_grad_reduction = method_of("_step_gradient", StepGradient.coalesce_grad_reduction)
    allreduce_gradients = method_of("_step_gradient", StepGradient.allreduce_gradients)
    set_gradient_accumulation_boundary = method_of("_step_gradient", StepGradient.set_gradient_accumulation_boundary)
    is_gradient_accumulation_boundary = method_of("_step_gradient", StepGradient.is_gradient_accumulation_boundary)
    set_train_batch_size = method_of("_step_gradient", StepGradient.set_train_batch_size)
    set_train_micro_batch_size = method_of("_step_gradient", StepGradient.set_train_micro_batch_size)

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        """Drop what `zero_grad` drops, and the `.grad` of parameters whose gradients the engine does not take."""
        self.zero_grad(set_to_none)
        if not self.has_gradient:
            type(self.module).zero_grad(self.module, set_to_none)

    # The methods below wait for commits, and save and load steps.

    wait_for_commit = method_of("_saved_steps", SavedSteps.wait_for_commit)
    commit_last_step = method_of("_saved_steps", SavedSteps.commit_last_step)
    save_checkpoint = method_of("_saved_steps", SavedSteps.save_checkpoint)
    load_checkpoint = method_of("_saved_steps", SavedSteps.load_checkpoint)
    export = method_of("_saved_steps", SavedSteps.export)

    # The methods below read, write and load the weights of the whole model.

    full_state_dict = method_of("_whole_model", WholeModel.full_state_dict)
    load_state_dict = method_of("_whole_model", WholeModel.load_state_dict)
    save_16bit_model = method_of("_whole_model", WholeModel.save_16bit_model)
    _zero3_consolidated_16bit_state_dict = method_of("_whole_model", WholeModel.consolidated_16bit_state_dict)

    # The methods below read and change the states of single parameters.

    is_trained = method_of("_parameter_states", ParameterStates.is_trained)
    get_full = method_of("_parameter_states", ParameterStates.get_full)
    get_local = method_of("_parameter_states", ParameterStates.get_local)
    set_full = method_of("_parameter_states", ParameterStates.set_full)
    set_local = method_of("_parameter_states", ParameterStates.set_local)
    set_many = method_of("_parameter_states", ParameterStates.set_many)
    sharded_state_dict = method_of("_parameter_states", ParameterStates.sharded_state_dict)
    gathered = method_of("_parameter_states", ParameterStates.gathered)
    register_external_parameter = method_of("_parameter_states", ParameterStates.register_external_parameter)

    # The methods below free memory of the device for a while.

    empty_partition_cache = method_of("_device_room", DeviceRoom.empty_partition_cache)
    offload_states = method_of("_device_room", DeviceRoom.offload_states)
    reload_states = method_of("_device_room", DeviceRoom.reload_states)
    state_devices = method_of("_device_room", DeviceRoom.state_devices)
    set_gpu_budget = method_of("_device_room", DeviceRoom.set_gpu_budget)

    # The methods below are further ones of DeepSpeed's engine.

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the model in place, as `module.compile` does. docs/models.md says how to compile single units."""
        self._held_model.compile(self.module, backend, compile_kwargs or {})

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of the engine as a module, by names that begin with "module."; the arguments are torch's.

        At stage 3, parameters that are not gathered have no elements in the dict, as with DeepSpeed: the dict has the
        names, dtypes and buffers of the model. `full_state_dict` returns the values. The other ranks need not call
        this.
        """
        if not has_released(self.module):
            return super().state_dict(*args, **kwargs)
        log.warning(
            "engine.state_dict() at stage 3 has names and no values, because the weights are in the store: call "
            "engine.full_state_dict() on every rank for the values"
        )
        with self._loop.refusals.allow_empty():
            return without_released(super().state_dict(*args, **{**kwargs, "keep_vars": True}))

    # The methods and attributes below do not exist in DeepSpeed's engine.

    data_plane = AttributeOf[str]("_loop")
    daemon_restarts = AttributeOf[Sequence[Restart]]("_loop")
    placement = method_of("_loop", TrainingLoop.placement)
    step_report = method_of("_loop", TrainingLoop.step_report)
    give_up_model = method_of("_held_model", HeldModel.give_up_model)

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
        if self._loop.is_sharded:
            self._loop.require_between_steps("the end of the engine's use of its model")
            self._held_model.give_back(self.full_state_dict())
        self.close()
        self._loop.was_taken_over = True
        self.module.cpu()

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed."""
        return self._loop.is_closed

    # The methods below close the engine.

    def close(self) -> None:
        """Commit the last step, wait for the other ranks, leave the job, and stop the daemon if the run started it.

        At stages 0 to 2 the model is afterwards a plain torch module with its weights, on the device. At stage 3 the
        model has no weights afterwards, because they are in the store.

        A repeated call has no effect, and a step that is committed already is not committed again. All ranks must call
        this, because a rank that leaves early could stop the daemon while other ranks still read from it. In a forked
        child of the rank's process the call has no effect.
        """
        if self._loop.is_closed or not self._loop.is_of_this_process:
            return
        try:
            self.reload_states()
            if self._hooks.phase not in (Phase.STEP, Phase.FAILED):
                self._saved_steps.commit_and_meet()
        finally:
            self.close_without_commit()

    def destroy(self) -> None:
        """Close the engine, as `close` does."""
        self.close()

    def close_without_commit(self) -> None:
        """Close the engine after a run that may have failed.

        The call begins no commit. It waits for the commit that is under way at this rank's store, and not for other
        ranks. A repeated call has no effect.
        """
        if self._loop.is_closed or not self._loop.is_of_this_process:
            return
        self._loop.is_closed = True
        at_exit.unregister(self)
        self._remains.close_no_more()
        was_interrupted = _is_interrupted()
        self._store.stop_reattaching()
        self._hooks.stop_watching_gradients()
        self._loop.refusals.allow_changes()
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
            if not self._loop.is_sharded:
                self._held_model.leave()

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


def _is_interrupted() -> bool:
    """Return whether Ctrl-C is ending the program: KeyboardInterrupt is being handled, or no handler caught it."""
    return isinstance(sys.exception() or getattr(sys, "last_value", None), KeyboardInterrupt)
