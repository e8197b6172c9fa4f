"""Hooks on the model that gather and release its parameters, and take over and reduce its gradients.

The hooks are on the modules, on their outputs and inputs, and on the parameters.

This module owns the hooks around forwards, the two traces, and the phases of a step and of the engine's end.
unit_holds.py knows which units are held, outermost_forward.py undoes a forward that fails, and backward_hooks.py has
the backward passes. The hooks must never change what the model computes: they look at tensors and do not replace them
(except for the cast of the root's floating-point inputs).

[Note: the life of a unit in a step]
Forward: a unit is gathered before its module's forward and released after it. The root unit surrounds all other units:
it is gathered while any module outside of them runs, and from a forward with gradients to the end of its backward.
Backward: a unit is gathered when the gradient of one of its outputs is there, or while activation checkpointing runs
its forward again. Its backward is over when the gradients of all its inputs are there. Autograd accumulates the
parameter gradients that are ready before it does anything else, so the parameters have their gradients by then, except
for those on a branch that does not lead to an input. The unit is released at that moment, unless gradients are missing,
and its gradients are reduced in the order of reduction_order.py. At the end of backward all units are released, and the
gradients that came late are reduced.

[Note: hooks and torch.func] The backward pass of torch.func.grad, vjp or jacrev belongs to the transform, whose tensors
have no storage. So the hooks do not watch them, and that pass is no backward pass of the engine. A unit whose forward
runs within a transform stays gathered until the next pass or step of the engine ends, because the transform's backward
needs it.

[Note: hooks and torch.compile] Hooks take leases, communicate and remember, which torch.compile cannot trace. So the
hooks are disabled for torch.compile, which then runs them between its graphs. The gather of an external parameter's
owner is disabled, too, so the graph of a compiled unit is cut in two at the place where the parameter is used, unless
it is registered with `register_external_parameter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_client.base.lanes.lanes import Lanes
from trainer_client.base.recorder import Recorder
from trainer_client.errors import InPlaceChangeError, PhaseError, SessionEndedError
from trainer_client.training.model.stand_in import only_for
from trainer_client.training.model.transforms import outside_of_transforms
from trainer_client.training.model.units import Unit
from trainer_client.training.step.backward_hooks import NO_GRAPH_TASK, BackwardHooks, UserBackward
from trainer_client.training.step.gradients import Gradients
from trainer_client.training.step.open_forwards import OpenForwards
from trainer_client.training.step.outermost_forward import OutermostForward
from trainer_client.training.step.parameter_hooks import ParameterHooks
from trainer_client.training.step.phases import Phase, Phases, Verb
from trainer_client.training.step.precision import cast_floating_inputs
from trainer_client.training.step.reduction_order import ReductionOrder
from trainer_client.training.step.residency import Part, Residency, UnitHolder
from trainer_client.training.step.small_reads import SmallReads
from trainer_client.training.step.trace import Clock, Trace
from trainer_client.training.step.unit_holds import Frame, UnitHolds
from trainer_client.training.step.updates import Updates


class UnitHooks:
    """The hooks of one engine: torch calls them in forward and backward, and they gather, release and reduce units.

    Args:
        units: all units, the root first.
        compute_dtype: the dtype to cast the root's floating-point inputs to; None: they stay as they are.
        clock: the clock of the job, so that positions go on growing after a resume.
        recorder: records the phases, and the times in which each unit's code runs.
        user_backward: gives the plan of a pass when a gradient comes and `engine.backward` is not running, because the
            user has then called `loss.backward()`.
        is_running_again: returns whether a module runs only to compute a boundary again, so that no backward of this
            forward is expected.
        small_reads: the parameters that the script may read outside of forwards.

    Attributes:
        forward: the outermost forward.
        backward: the backward passes.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        gradients: Gradients,
        updates: Updates,
        residency: Residency,
        lanes: Lanes,
        reduction_order: ReductionOrder,
        compute_dtype: torch.dtype | None,
        clock: Clock,
        recorder: Recorder,
        user_backward: UserBackward,
        is_running_again: Callable[[], bool],
        small_reads: SmallReads,
    ) -> None:
        self._units = units
        self._root = units[0]
        self._residency = residency
        self._lanes = lanes
        self._compute_dtype = compute_dtype
        self._recorder = recorder
        self._small_reads = small_reads
        self._phases = Phases(recorder.enter_phase)
        self._training = Trace(clock)
        self._inference = Trace(clock, amid=self._training)
        self._forwards = OpenForwards(units)
        self._parameter_hooks = ParameterHooks(units, gradients)
        self._module_hooks: list[RemovableHandle] = []
        self._holds = UnitHolds(units, self._inference, self._phases, residency, lanes, recorder, small_reads)
        self.forward = OutermostForward(
            self._training, self._inference, self._phases, self._holds, self._forwards, residency, recorder
        )
        self.backward = BackwardHooks(
            units=units,
            training=self._training,
            phases=self._phases,
            holds=self._holds,
            forward=self.forward,
            forwards=self._forwards,
            parameter_hooks=self._parameter_hooks,
            gradients=gradients,
            updates=updates,
            residency=residency,
            lanes=lanes,
            reduction_order=reduction_order,
            recorder=recorder,
            user_backward=user_backward,
            is_running_again=is_running_again,
        )

    def serve(self, engine: object) -> None:
        """Keep the engine alive while the hooks are on the model, because the model cannot compute without it."""
        self._holds.engine = engine

    @property
    def phase(self) -> Phase:
        """The phase of the engine, which says what calls may follow; see phases.py."""
        return self._phases.current

    def install(self) -> None:
        """Register the hooks on the model. Those on its modules stay until `give_up_model` or `leave_model`."""
        inside: set[nn.Module] = set()
        for unit in self._units[1:]:
            for use, module in zip(self._forwards.uses_of(unit), unit.uses, strict=True):
                inside.update(module.modules())
                before, after = partial(self.backward.before_unit, unit, use), partial(self.backward.after_unit, unit)
                self._hook(module, unit, before, after, use=use)
        for module in self._root.module.modules():
            if module is self._root.module:
                self._hook(module, self._root, self._before_root, partial(self.backward.after_unit, self._root))
            elif module not in inside:
                self._hook(module, self._root, None, None)
        self._parameter_hooks.install(self.backward.accumulate_gradient)
        for unit in self._units:
            for group in unit.groups:
                group.gather_on_use(torch.compiler.disable(partial(self._holds.gather_owner_on_use, unit)))

    def register_external_parameter(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather the unit of `parameter` with the unit of `module` from now on.

        The user calls this because each forward of `module` uses the parameter.

        Raises:
            ConfigError: the module or the parameter is not part of the model.
        """
        self._holds.external.register(module, parameter)

    def show_gradients(self) -> None:
        """Let the script use `.grad` again, because a forward or a step begins, or the step's gradients are freed."""
        self._parameter_hooks.show_gradients()

    def fail_change(self) -> None:
        """Enter the phase FAILED, because a change of states between two steps has failed half-way."""
        self._phases.enter(Verb.FAIL_CHANGE)

    def begin_offload(self) -> None:
        """Release all units, because states are about to leave the device."""
        self._phases.check(Verb.OFFLOAD)
        self.release_units()
        self._phases.enter(Verb.OFFLOAD)

    def end_offload(self) -> None:
        """Leave the phase OFFLOADED, because all states are back on the device."""
        self._phases.enter(Verb.RELOAD)

    def release_units(self) -> None:
        """Release all gathered units, because the user changes parameters between two steps.

        Copies that stayed gathered would have the values from before the change.
        """
        self._residency.release_all()
        # A release of a unit also drops torch's autocast copies of its parameters. Resident units are not released, so
        # the copies of their parameters are dropped here; see flat_group.py [Note: autocast].
        torch.clear_autocast_cache()

    def give_up_model(self) -> None:
        """Remove all hooks, and leave the parameters to the user, in memory of their own and uninitialised."""
        self._remove()
        self._residency.release_all()
        for unit in self._units:
            for group in unit.groups:
                group.give_up_parameters()

    def leave_model(self) -> None:
        """Remove all hooks, and leave the parameters that are always on this rank to the user, with their values."""
        self._remove()
        for unit in self._units:
            for group in unit.groups:
                group.leave_parameters()

    def _remove(self) -> None:
        self._holds.engine = None
        self.stop_watching_gradients()
        for handle in self._module_hooks:
            handle.remove()
        self._module_hooks.clear()

    def stop_watching_gradients(self) -> None:
        """Remove the hooks on parameters, and allow no reads of small ones, because the engine ends. Idempotent."""
        self._parameter_hooks.remove()
        self._small_reads.end()

    def begin_step(self) -> None:
        """Release all units with their leases, because the step is about to change the parameters.

        It can raise InPlaceChangeError.
        """
        self.forward.expect_none()
        self.show_gradients()
        self._phases.enter(Verb.BEGIN_STEP)
        self._lanes.finish_copies_in()
        self._residency.require_unchanged()
        for unit in self._units:
            unit.require_undoubted()
        self._holds.end_all(keep=False)
        self._forwards.end_all()
        self._holds.external.end_step()

    def finish_step(self) -> None:
        """Take note that the parameters are updated, and have the store fetch what the next step uses first."""
        # A release of a unit also drops torch's autocast copies of its parameters. Resident units are not released, so
        # the copies of their parameters are dropped here; see flat_group.py [Note: autocast].
        torch.clear_autocast_cache()
        self._training.end()
        self._residency.pause()
        self._residency.prefetch(self._training)
        self._phases.enter(Verb.END_STEP)

    # The next methods are the engine's forward hooks on modules.

    def _hook(
        self,
        module: nn.Module,
        unit: Unit,
        before: Callable[[Any, Any], Any] | None,
        after: Callable[[Frame, Any], None] | None,
        *,
        use: int = 0,
    ) -> None:
        """Register hooks that call `before` and `after` around the module's forward, which is this `use` of `unit`."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if next(reversed(module._forward_hooks)) != last[-1].id:
                # The script has registered forward hooks after those of the engine, and the script's hooks may read the
                # parameters. The engine's hooks release the unit, so they are moved to the end again.
                for handle in last:
                    module._forward_hooks[handle.id] = module._forward_hooks.pop(handle.id)
            with outside_of_transforms():
                self._enter(unit, module, use)
            return before(args, kwargs) if before is not None else None

        def finish(_: nn.Module, __: Any, output: Any) -> None:
            frame = self._holds.running[-1] if self._holds.running else None
            if frame is None or frame.module is not module:
                raise PhaseError(
                    "the engine was called within a forward of its model: call its methods after the forward; within "
                    "it, call the model's modules, and torch.autograd.grad for gradients"
                )
            if after is not None:
                after(frame, output)
            frame.has_returned = True

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            with outside_of_transforms():
                self._leave(module)

        def hook(function: Callable[..., Any]) -> Callable[..., Any]:
            own: Callable[..., Any] = torch.compiler.disable(only_for((module,), function))
            return own

        last = [
            module.register_forward_hook(hook(finish)),
            module.register_forward_hook(hook(leave), always_call=True),
        ]
        self._module_hooks += [module.register_forward_pre_hook(hook(enter), with_kwargs=True), *last]

    def _enter(self, unit: Unit, module: nn.Module, use: int) -> None:
        """Note a forward that begins, and gather its unit, unless a forward of the same unit surrounds it."""
        if self._phases.current in (Phase.STEP, Phase.FAILED) or self.backward.is_lost:
            raise PhaseError(f"the model's forward was called where it cannot be: {self._phases.current.value}")
        self._prepare_training()
        outermost = not self._holds.running
        if outermost and self._phases.current is not Phase.BACKWARD:
            self.show_gradients()
        if outermost and torch.is_grad_enabled() and torch._C._current_graph_task_id() != NO_GRAPH_TASK:
            # A backward pass is running this forward again, for a checkpoint. If the user has started that pass, the
            # engine notes its beginning here. At the first gradient it would be too late, because reentrant
            # checkpointing computes gradients in a pass of its own, which ends earlier than the user's pass.
            self.backward.require()
        nested = any(frame.unit is unit for frame in self._holds.running)
        if outermost:
            self._forwards.begin_outermost()
        self._holds.running.append(Frame(unit, module, self._forwards.begun, torch._C._autograd._get_sequence_nr()))
        if outermost and self._phases.current is not Phase.BACKWARD:
            self.forward.begin()
        if self._phases.current is Phase.FORWARD and self._holds.trace is self._training and not unit.is_root:
            self._forwards.note_use(use)
        if not nested:
            self._holds.hold(unit, Part.FORWARD, self._holds.external.registered(unit))

    def _prepare_training(self) -> None:
        """Before an outermost forward with gradients, prepare the parameters and their hooks for training.

        Resident parameters get the memory that is trained again, because the script may have assigned tensors to
        `.data`. The engine's hooks on parameters are called after the script's.

        It can raise ConfigError.
        """
        if not self._holds.running and torch.is_grad_enabled() and self._phases.current is not Phase.BACKWARD:
            self._parameter_hooks.keep_last()
            for unit in self._units:
                unit.take_back_parameters()

    def _leave(self, module: nn.Module) -> None:
        """Note that the forward of `module` has ended, has raised, or was refused before it began."""
        if not self._holds.running or self._holds.running[-1].module is not module:
            return
        frame = self._holds.running.pop()
        unit = frame.unit
        if not frame.has_returned:
            self._forwards.undo(frame.begun)
            if not self._holds.running and self._phases.current is not Phase.BACKWARD:
                self.forward.fail()
                return
        # If the forward has failed, the error of the forward is raised. An error of the release, for example because
        # the session with the store has ended, must not replace it.
        with nullcontext() if frame.has_returned else suppress(SessionEndedError, InPlaceChangeError):
            try:
                if all(other.unit is not unit for other in self._holds.running):
                    self._release_after_forward(unit, may_release=frame.may_release)
                if self._holds.running:
                    self._recorder.compute("forward", self._holds.running[-1].unit.fqn)
                else:
                    self._end_forward()
                    self._residency.check()
            except InPlaceChangeError:
                if not self._holds.running:
                    self.forward.fail()
                raise

    def _release_after_forward(self, unit: Unit, *, may_release: bool) -> None:
        """End the unit's hold for its forward, except that of the root in a forward with gradients.

        Without `may_release`, hold the unit for its backward first.
        """
        if unit.is_root and self._phases.current is Phase.FORWARD:
            return
        if not may_release:
            self._holds.hold_gathered(unit, Part.BACKWARD)
        self._residency.release(UnitHolder(unit.index, Part.FORWARD), self._holds.trace)

    def _end_forward(self) -> None:
        """Note that the outermost forward has ended; after one without gradients, leave the phase INFERENCE.

        It can raise InPlaceChangeError.
        """
        self._residency.require_unchanged()
        self._recorder.compute(None)
        if self._holds.trace is self._inference:
            # Modules within this inference may have run with gradients enabled, but no backward of them is expected. So
            # the records of their forwards are discarded.
            self._forwards.undo(0)
            self._inference.end()
        # The caller checks next that the leases are still valid. This check covers copies from leased memory only if
        # they are finished, so finish them here.
        self._lanes.finish_copies_in()
        self._residency.pause()
        if self._phases.current is Phase.INFERENCE:
            self._residency.release_all(keep=True)
            # Another inference may follow, or training may go on, so the store prefetches for both traces.
            self._residency.prefetch(self._training, self._inference)
            self._phases.enter(Verb.END_INFERENCE)

    def _before_root(self, args: Any, kwargs: Any) -> Any:
        """Return the root's inputs in the compute dtype; None if they need no cast."""
        if self._phases.current is Phase.BACKWARD or self._compute_dtype is None:
            return None
        return cast_floating_inputs((args, kwargs), self._compute_dtype)
