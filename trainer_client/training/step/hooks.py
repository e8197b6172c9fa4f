"""Hooks on the model that gather and release its parameters, and take over and reduce its gradients.

The hooks are on the modules, on their outputs and inputs, and on the parameters.

This module owns the phase's transitions, the traces and the forwards under way. It must never change what the model
computes: hooks look at tensors, they do not replace them (except for the cast of the root's floating-point inputs).

[Note: the life of a unit in a step]
Forward: a unit is gathered before its module's forward and released after it. The root unit surrounds all other units:
it is gathered while any module outside of them runs, and from a forward with gradients to the end of its backward.
Backward: a unit is gathered when the gradient of one of its outputs is there, or while activation checkpointing runs
its forward again. Its backward is over when the gradients of all its inputs are there. Autograd accumulates the
parameter gradients that are ready before it does anything else, so the parameters have their gradients by then, except
for those on a branch that does not lead to an input. The unit is released at that moment, unless gradients are missing,
and its gradients are reduced in the order of reduction_order.py. At the end of backward all units are released, and the
gradients that came late are reduced.

[Note: results beside the output] A module may leave a result in an attribute, as the auxiliary loss of a router. The
gradient of the result may come before those of the unit's outputs, or without them, so the result is watched as the
outputs are. Tensors that an object in the output hides cannot be watched. But autograd numbers its nodes as they are
made, and of those that are ready it runs the newest one first. So if a watched tensor comes from the unit's last node,
its gradient comes before those of hidden ones. If not, the unit stays gathered for its backward, as it does if there is
nothing to watch.

[Note: the way of a gradient] Autograd calls the hook on a parameter when its gradient is there. The hook hands the
gradient to Gradients, which adds it to the flat gradient of its group. When the backward of the unit is over, Gradients
reduces the group over the ranks, and a group whose gradient is final goes on to Updates, so that the store can begin
with its update while backward goes on.

[Note: gradients in a forward] A model may compute gradients in its forward (torch.autograd.grad), as forces from an
energy. That pass is a part of the forward and no backward pass of the engine: it ends no unit's backward. To the unit
that runs it, the parameters of the units that it passes through are external ones, which external_parameters.py
explains. So these units are gathered for it and, as autograd may make a graph of it (create_graph), again for the
backward of the unit that has run it.

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

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer_client.base.lanes.lanes import Lanes
from trainer_client.base.recorder import Recorder
from trainer_client.errors import InPlaceChangeError, PhaseError, ReleasedParameterError, SessionEndedError, StoreError
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.stand_in import only_for
from trainer_client.training.model.transforms import is_transformed, outside_of_transforms
from trainer_client.training.model.units import Unit, UnitState
from trainer_client.training.step.external_parameters import ExternalParameters
from trainer_client.training.step.gradient_hooks import AllGradientsHook, is_computed
from trainer_client.training.step.gradients import GradientGroup, Gradients
from trainer_client.training.step.heap_trimmer import HeapTrimmer
from trainer_client.training.step.open_forwards import OpenForwards
from trainer_client.training.step.parameter_hooks import ParameterHooks
from trainer_client.training.step.phases import Phase, Phases, Verb
from trainer_client.training.step.precision import cast_floating_inputs
from trainer_client.training.step.reduction_order import ReductionOrder
from trainer_client.training.step.residency import Part, Residency, UnitHolder
from trainer_client.training.step.small_reads import SmallReads
from trainer_client.training.step.tensor_tree import TensorTree, computed_attributes
from trainer_client.training.step.trace import Clock, Trace
from trainer_client.training.step.updates import Updates

# The value that torch returns as the number of the current graph task if no backward pass runs on this thread.
_NO_GRAPH_TASK = -1


@dataclass(slots=True)
class _Frame:
    """A forward of a unit's module that has begun and not ended. Forwards within it have records of their own.

    Attributes:
        begun: the number of forwards that began within the outermost one before this one. If this forward fails, those
            after this number are undone; see OpenForwards.
        first_node: the number of the first node of autograd's graph that this forward could make.
        may_release: whether the unit may be released after the forward, because the hooks will notice when its backward
            begins, or because it has no backward.
        has_returned: whether the module's forward has returned without an error.
    """

    unit: Unit
    module: nn.Module
    begun: int
    first_node: int
    may_release: bool = True
    has_returned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """The state in which the outermost forward began, and to which the hooks go back if it fails.

    Attributes:
        mark: the place in the trace, for Trace.rewind.
        holds: the holders and the units that they held, for Residency.go_back_to.
        used: how many units were used since the last backward pass. Later ones are removed if the forward fails.
    """

    phase: Phase
    trace: Trace
    mark: tuple[int, int]
    holds: frozenset[tuple[UnitHolder, int]]
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPlan:
    """The plan of a backward pass: what the hooks do with the gradients that come in the pass.

    Attributes:
        step: the step that the gradients of the pass are for.
        reduces: whether the pass reduces gradients over the ranks; see Gradients.begin_backward.
        is_last: whether the pass reduces gradients and no other pass of the step follows, so that the store may begin
            with updates in the pass.
        gradient_factor: the hooks multiply each parameter's gradient by this number.
    """

    step: int
    reduces: bool
    is_last: bool = True
    gradient_factor: float = 1.0


class UserBackward(Protocol):
    """The calls before and after a pass that the user starts by `loss.backward()`; see BackwardPasses."""

    def begin_for_user(self) -> BackwardPlan:
        """Return the plan of the user's backward pass, which begins now. All ranks must call this.

        Raises:
            RuntimeError: fp16 training needs a scaled loss, and the loss of this pass is not scaled.
        """

    def end(self) -> None:
        """Count the user's backward pass, which has ended without an error, as a pass of the step."""


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
        self._gradients = gradients
        self._updates = updates
        self._residency = residency
        self._lanes = lanes
        self._reduction_order = reduction_order
        self._compute_dtype = compute_dtype
        self._recorder = recorder
        self._user_backward = user_backward
        self._is_running_again = is_running_again
        self._small_reads = small_reads
        self._phases = Phases(recorder.enter_phase)
        self._training = Trace(clock)
        self._inference = Trace(clock, amid=self._training)
        self._trace = self._inference
        # `_plan`: for which step the current backward pass is, or the last one was, and whether that pass reduces
        # gradients. `_is_users`: whether the script has started that pass by `loss.backward()`, and not by
        # `engine.backward`.
        self._plan = BackwardPlan(step=0, reduces=True)
        self._is_users = False
        self._running: list[_Frame] = []
        self._external = ExternalParameters(units)
        self._forwards = OpenForwards(units)
        # `_in_backward`: the units whose backward has begun and is not over. `_almost_over`: those of them whose input
        # gradients have all come, while autograd has yet to accumulate some parameter gradients.
        self._in_backward: set[int] = set()
        self._almost_over: set[int] = set()
        # For each unit that is released after its forward: the modules of the unit, in whose attributes the forward may
        # leave results. The gradients of these results begin the unit's backward, as those of its outputs do. Empty for
        # other units.
        self._modules_of: list[Sequence[nn.Module]] = [
            () if unit.is_root or unit.state is UnitState.RESIDENT else tuple(unit.module.modules()) for unit in units
        ]
        # The state of the engine before the last outermost forward, to which `fail_forward` goes back. None if that
        # forward cannot be undone any more.
        self._before: _Before | None = None
        # The uses of units since the last backward pass, each once and in the order in which they came. A dict serves
        # as an ordered set, so the values are None.
        self._used: dict[int, None] = {}
        self._parameter_hooks = ParameterHooks(units, gradients)
        self._module_hooks: list[RemovableHandle] = []
        self._engine: object = None
        # Returns free heap memory to the kernel between uses of tiles. None if no tile computes on the CPU.
        tiles = (unit for unit in units if unit.tile is not None)
        on_cpu = any(group.device.type == "cpu" for unit in tiles for group in unit.groups)
        self._heap_trimmer = HeapTrimmer() if on_cpu else None

    def serve(self, engine: object) -> None:
        """Keep the engine alive while the hooks are on the model, because the model cannot compute without it."""
        self._engine = engine

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
                before, after = partial(self._before_unit, unit, use), partial(self._after_unit, unit)
                self._hook(module, unit, before, after, use=use)
        for module in self._root.module.modules():
            if module is self._root.module:
                self._hook(module, self._root, self._before_root, partial(self._after_unit, self._root))
            elif module not in inside:
                self._hook(module, self._root, None, None)
        self._parameter_hooks.install(self._accumulate_gradient)
        for unit in self._units:
            for group in unit.groups:
                group.gather_on_use(torch.compiler.disable(partial(self._gather_owner_on_use, unit)))

    def register_external_parameter(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """Gather the unit of `parameter` with the unit of `module` from now on.

        The user calls this because each forward of `module` uses the parameter.

        Raises:
            ConfigError: the module or the parameter is not part of the model.
        """
        self._external.register(module, parameter)

    def begin_backward(self, plan: BackwardPlan) -> None:
        """Take note that a backward pass begins. All ranks must call this; it does not wait for them."""
        self.expect_forward()
        self._parameter_hooks.show_gradients()
        self._parameter_hooks.keep_last()
        self._phases.enter(Verb.BEGIN_BACKWARD)
        self._trace = self._training
        self._plan = plan
        self._is_users = False
        self._gradients.begin_backward(reduces=plan.reduces, is_last=plan.is_last)
        self._reduction_order.begin(
            [use for use in self._used if self._gradients.has_gradients(self._forwards.unit_of(use))]
        )
        self._residency.pause()
        self._gather_for_backward(self._root)

    def finish_backward(self) -> None:
        """Reduce the gradients that are left and release all units, because autograd is done. All ranks must call this.

        It can raise InPlaceChangeError.
        """
        self._residency.pause()
        self._residency.require_unchanged()
        for use in self._reduction_order.finish():
            self._reduce(use)
        self._end_uses(keep=True)
        self._used = {use: None for use in self._used if self._forwards.is_open(use)}
        self._gradients.finish_backward(self._plan.step)
        self._recorder.compute(None)
        self._phases.enter(Verb.END_BACKWARD)
        self._parameter_hooks.hide_gradients()

    def abort_backward(self) -> bool:
        """Free the units' memory and release their leases, without a collective, because autograd or a hook has failed.

        Returns:
            Whether a backward pass was under way. False if the phase did not allow a backward pass.
        """
        if self.phase is not Phase.BACKWARD:
            return False
        self._phases.enter(Verb.FAIL_BACKWARD)
        self._reduction_order.abandon()
        # The caller raises the error that has made the backward fail. Errors of the store at this place only follow
        # from that failure, so they are ignored.
        with suppress(StoreError):
            self._end_uses(keep=False)
        return True

    @property
    def has_lost_backward(self) -> bool:
        """Whether the user's `loss.backward()` has ended with an error, after which autograd calls no hook.

        Such a pass still counts as under way here, because autograd calls `_finish_user_backward` only at the end of a
        pass without an error.
        """
        return self._is_users and self.phase is Phase.BACKWARD and torch._C._current_graph_task_id() == _NO_GRAPH_TASK

    def expect_forward(self) -> None:
        """Take note that no forward is under way, and that the last one cannot be undone any more.

        If a forward is still noted as running, it has failed: torch calls no hook when a module that the user called
        directly is left by a KeyboardInterrupt.
        """
        if self._running:
            self.fail_forward()
        self._before = None

    def fail_forward(self) -> None:
        """Undo the outermost forward, which has failed. Idempotent.

        The units that it held are released and its records are dropped, so that the next forward begins in the same
        state as this one.
        """
        self._running.clear()
        self._forwards.undo(0)
        before, self._before = self._before, None
        if before is None or self.phase not in (Phase.INFERENCE, Phase.FORWARD):
            return
        before.trace.rewind(before.mark)
        while len(self._used) > before.used:
            self._used.popitem()
        self._recorder.compute(None)
        self._residency.pause()
        if before.phase is Phase.IDLE:
            self._phases.enter(Verb.FAIL_FORWARD)
        # The caller raises the error that has made the forward fail. Errors of the store at this place only follow from
        # that failure, so they are ignored.
        with suppress(StoreError):
            self._residency.go_back_to(before.holds)

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
        self._engine = None
        self.stop_watching_gradients()
        for handle in self._module_hooks:
            handle.remove()
        self._module_hooks.clear()

    def begin_step(self) -> None:
        """Release all units with their leases, because the step is about to change the parameters.

        It can raise InPlaceChangeError.
        """
        self.expect_forward()
        self.show_gradients()
        self._phases.enter(Verb.BEGIN_STEP)
        self._lanes.finish_copies_in()
        self._residency.require_unchanged()
        for unit in self._units:
            unit.require_undoubted()
        self._end_uses(keep=False)
        self._forwards.end_all()
        self._external.end_step()
        self._used.clear()

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
        after: Callable[[_Frame, Any], None] | None,
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
            frame = self._running[-1] if self._running else None
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
        if self.phase in (Phase.STEP, Phase.FAILED) or self.has_lost_backward:
            raise PhaseError(f"the model's forward was called where it cannot be: {self.phase.value}")
        self._prepare_training()
        outermost = not self._running
        if outermost and self.phase is not Phase.BACKWARD:
            self.show_gradients()
        if outermost and torch.is_grad_enabled() and torch._C._current_graph_task_id() != _NO_GRAPH_TASK:
            # A backward pass is running this forward again, for a checkpoint. If the user has started that pass, the
            # engine notes its beginning here. At the first gradient it would be too late, because reentrant
            # checkpointing computes gradients in a pass of its own, which ends earlier than the user's pass.
            self._require_backward()
        nested = any(frame.unit is unit for frame in self._running)
        if outermost:
            self._forwards.begin_outermost()
        self._running.append(_Frame(unit, module, self._forwards.begun, torch._C._autograd._get_sequence_nr()))
        if outermost and self.phase is not Phase.BACKWARD:
            grad = torch.is_grad_enabled()
            before = self.phase
            self._phases.enter(Verb.BEGIN_FORWARD if grad else Verb.BEGIN_INFERENCE)
            self._trace = self._training if grad else self._inference
            self._before = _Before(
                phase=before,
                trace=self._trace,
                mark=self._trace.mark(),
                holds=self._residency.holds(),
                used=len(self._used),
            )
        if self.phase is Phase.FORWARD and self._trace is self._training and not unit.is_root:
            self._used.setdefault(use)
        if not nested:
            self._hold(unit, Part.FORWARD, self._external.registered(unit))

    def _prepare_training(self) -> None:
        """Before an outermost forward with gradients, prepare the parameters and their hooks for training.

        Resident parameters get the memory that is trained again, because the script may have assigned tensors to
        `.data`. The engine's hooks on parameters are called after the script's.

        It can raise ConfigError.
        """
        if not self._running and torch.is_grad_enabled() and self.phase is not Phase.BACKWARD:
            self._parameter_hooks.keep_last()
            for unit in self._units:
                unit.take_back_parameters()

    def _leave(self, module: nn.Module) -> None:
        """Note that the forward of `module` has ended, has raised, or was refused before it began."""
        if not self._running or self._running[-1].module is not module:
            return
        frame = self._running.pop()
        unit = frame.unit
        if not frame.has_returned:
            self._forwards.undo(frame.begun)
            if not self._running and self.phase is not Phase.BACKWARD:
                self.fail_forward()
                return
        # If the forward has failed, the error of the forward is raised. An error of the release, for example because
        # the session with the store has ended, must not replace it.
        with nullcontext() if frame.has_returned else suppress(SessionEndedError, InPlaceChangeError):
            try:
                if all(other.unit is not unit for other in self._running):
                    self._release_after_forward(unit, may_release=frame.may_release)
                if self._running:
                    self._recorder.compute("forward", self._running[-1].unit.fqn)
                else:
                    self._end_forward()
                    self._residency.check()
            except InPlaceChangeError:
                if not self._running:
                    self.fail_forward()
                raise

    def _release_after_forward(self, unit: Unit, *, may_release: bool) -> None:
        """End the unit's hold for its forward, except that of the root in a forward with gradients.

        Without `may_release`, hold the unit for its backward first.
        """
        if unit.is_root and self.phase is Phase.FORWARD:
            return
        if not may_release:
            self._hold_gathered(unit, Part.BACKWARD)
        self._residency.release(UnitHolder(unit.index, Part.FORWARD), self._trace)

    def _end_forward(self) -> None:
        """Note that the outermost forward has ended; after one without gradients, leave the phase INFERENCE.

        It can raise InPlaceChangeError.
        """
        self._residency.require_unchanged()
        self._recorder.compute(None)
        if self._trace is self._inference:
            # Modules within this inference may have run with gradients enabled, but no backward of them is expected. So
            # the records of their forwards are discarded.
            self._forwards.undo(0)
            self._inference.end()
        # The caller checks next that the leases are still valid. This check covers copies from leased memory only if
        # they are finished, so finish them here.
        self._lanes.finish_copies_in()
        self._residency.pause()
        if self.phase is Phase.INFERENCE:
            self._residency.release_all(keep=True)
            # Another inference may follow, or training may go on, so the store prefetches for both traces.
            self._residency.prefetch(self._training, self._inference)
            self._phases.enter(Verb.END_INFERENCE)

    def _before_root(self, args: Any, kwargs: Any) -> Any:
        """Return the root's inputs in the compute dtype; None if they need no cast."""
        if self.phase is Phase.BACKWARD or self._compute_dtype is None:
            return None
        return cast_floating_inputs((args, kwargs), self._compute_dtype)

    def _before_unit(self, unit: Unit, use: int, args: Any, kwargs: Any) -> None:
        """Watch the gradients of the unit's inputs, because its backward is over when all of them have come."""
        # In a recomputation no hooks are set on the inputs of the unit, because the forward that made the graph has
        # recorded the use already. Reentrant checkpointing is the exception, because it has run that forward without
        # gradients. A forward that only computes a boundary again has no backward, so hooks on its inputs would never
        # be called and would keep the inputs alive.
        is_recomputed = self.phase is Phase.BACKWARD and (self._forwards.is_open(use) or self._is_running_again())
        if torch.is_grad_enabled() and not is_recomputed and not is_transformed():
            self._watch_inputs(unit, use, TensorTree.of((args, kwargs)))

    def _after_unit(self, unit: Unit, frame: _Frame, output: Any) -> None:
        """Watch the gradients of the unit's results, because its backward begins when the first of them comes.

        If the unit returns its own parameters, hold it for its caller, too.
        """
        if is_transformed():
            frame.may_release = False
            return
        tree = TensorTree.of(output)
        if torch.is_grad_enabled():
            last_node = torch._C._autograd._get_sequence_nr() - 1
            beside = computed_attributes(self._modules_of[unit.index], frame.first_node)
            newest = self._watch_results(unit, (*tree.tensors, *beside))
            if newest is None:
                # No output of the unit requires a gradient, so no hook can tell when the unit's backward begins. So the
                # unit stays gathered after its forward, unless it has no backward.
                has_none = bool(tree.tensors) and not tree.hides_some and not self._gradients.has_gradients(unit)
                frame.may_release = has_none
            else:
                # The unit may be released after its forward only if hooks on its results will tell when its backward
                # begins; see [Note: results beside the output].
                shows_all = bool(tree.requiring_grad()) and not tree.hides_some
                frame.may_release = shows_all or newest >= last_node
        if any(group.holds_memory_of(tensor) for group in unit.groups for tensor in tree.tensors):
            self._share_with_caller(unit)

    # The next methods are the hooks that run in backward passes, and the methods that install them.

    @property
    def _is_amid_forward(self) -> bool:
        """Whether a forward is under way, to which gradients that come belong; see [Note: gradients in a forward]."""
        return bool(self._running) and self.phase is not Phase.BACKWARD

    def _require_backward(self) -> None:
        """Begin a backward pass of the user's if none is under way, because autograd has called a hook.

        Raises:
            PhaseError: the engine is in a phase in which no backward pass can begin.
        """
        if self.phase is Phase.BACKWARD:
            return
        self._phases.check(Verb.BEGIN_BACKWARD)
        self.begin_backward(self._user_backward.begin_for_user())
        self._is_users = True
        # Autograd calls `_finish_user_backward` at the end of the pass, before `loss.backward()` returns.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_user_backward)

    def _finish_user_backward(self) -> None:
        """End a backward pass that the user has started. All ranks must call this."""
        self.finish_backward()
        self._user_backward.end()

    def _watch_results(self, unit: Unit, results: Iterable[torch.Tensor]) -> int | None:
        """Register hooks that gather the unit when the gradient of one of its results comes.

        Returns:
            The number of the newest node that has made a result; None if none will have a gradient.
        """
        newest: int | None = None
        for tensor in results:
            if tensor.requires_grad and (node := tensor.grad_fn) is not None:
                tensor.register_hook(partial(self._before_backward, unit))
                newest = max(newest or 0, node._sequence_nr())
        return newest

    def _watch_inputs(self, unit: Unit, use: int, inputs: TensorTree) -> None:
        """Record a forward of the unit, and have its backward end when the gradients of all `inputs` have come."""
        forward = self._forwards.begin(use)
        tensors = inputs.requiring_grad()
        if not tensors:
            return  # No input tells when the unit's backward is over, so it lasts until the end of backward.
        # The inputs of a reentrant checkpoint are leaves. Autograd accumulates the gradients of leaves in any order, so
        # when all inputs have their gradients, some parameters of the unit may still miss theirs.
        has_leaves = any(tensor.is_leaf for tensor in tensors)

        def after_backward() -> bool:
            if self._is_amid_forward:
                return False
            self._forwards.end(use, forward)
            if not self._forwards.is_open(use):
                self._after_backward(unit, use, waits=has_leaves)
            elif unit.tile is not None:
                self._release_after_backward(unit)
            return True

        forward.hook = ref(AllGradientsHook(tensors, after_backward))

    def _before_backward(self, unit: Unit, _: torch.Tensor) -> None:
        """Begin the unit's backward, because the gradient of one of its results has come."""
        if self._is_amid_forward:
            self._hold_for_user(self._running[-1].unit, {unit.index, *self._external.owners_of(unit)})
            return
        self._require_backward()
        if torch.is_grad_enabled():
            # Autograd makes a graph of this backward pass (create_graph=True), and a later pass of the same step may
            # run backward through that graph. No hook tells when that later pass needs this unit. So the unit is noted
            # as one that the root needs, and stays gathered as long as the root does in each later pass of the step.
            self._external.note(self._root, {unit.index, *self._external.owners_of(unit)})
        self._gather_for_backward(unit)

    def _gather_for_backward(self, unit: Unit) -> None:
        """Gather the unit for its backward, and ask for the memory of its gradients. Idempotent."""
        if unit.index in self._in_backward:
            return
        self._in_backward.add(unit.index)
        self._gradients.start_backward(unit, self._plan.step)
        self._hold(unit, Part.BACKWARD, self._external.owners_of(unit))

    def _after_backward(self, unit: Unit, use: int, *, waits: bool) -> None:
        """Release the unit and reduce what can be reduced now, because the gradients of all its inputs have come.

        Args:
            use: the use of the unit whose backward is over.
            waits: whether the unit stays gathered while parameter gradients are missing. If they do not come, the unit
                is released and reduced at the end of the backward pass.
        """
        self._lanes.poll()
        if unit.tile is None:
            # All ranks reduce and gather units in one order, so whether the backward of a unit is over must not depend
            # on which parameters this rank has used. So this rank does not wait for gradients that its pass does not
            # compute.
            for gradient in self._gradients.of_unit(unit):
                gradient.expect_only(is_computed)
        has_all = self._gradients.has_all_of_pass(unit)
        if waits and not has_all:
            self._almost_over.add(unit.index)
            return
        over = self._reduction_order.unit_is_over(use)
        if has_all:
            self._recorder.compute("backward", self._root.fqn)
            # The unit is released before its gradients are reduced. The reduction may begin an early update, and the
            # store updates bytes in its host memory only while no lease on them is held.
            self._release_after_backward(unit)
        for each in over:
            self._reduce(each)

    def _release_after_backward(self, unit: Unit) -> None:
        """End the unit's hold for its backward, and release the unit unless another part of the step needs it."""
        self._in_backward.discard(unit.index)
        self._residency.release(UnitHolder(unit.index, Part.BACKWARD), self._trace)

    def _reduce(self, use: int) -> None:
        """Reduce the unit's gradients, and have the store begin with the update of each group that is final."""
        unit = self._forwards.unit_of(use)
        next_use = self._trace.next_use(unit.index)
        comes_again = self._forwards.is_another_open(use)
        for gradient in self._gradients.of_unit(unit):
            if self._gradients.reduce(gradient, self._plan.step, next_use) and not comes_again:
                self._gradients.hand_over(gradient, partial(self._updates.begin_early, gradient))
        self._lanes.poll()

    def stop_watching_gradients(self) -> None:
        """Remove the hooks on parameters, and allow no reads of small ones, because the engine ends. Idempotent."""
        self._parameter_hooks.remove()
        self._small_reads.end()

    def _accumulate_gradient(self, unit: Unit, gradient: GradientGroup, slot: int, tensor: torch.Tensor) -> None:
        """Take a parameter's gradient over, and end the unit's backward if only this gradient was missing.

        Raises:
            PhaseError: a forward is under way, or the engine is in a phase in which no backward pass can begin.
        """
        if self._is_amid_forward:
            tensor.grad = None
            raise PhaseError(
                "backward() was called while a forward of the model is under way: within a forward, call "
                "torch.autograd.grad; after a forward that was interrupted, call engine.backward(loss)"
            )
        self._require_backward()
        gradient.accumulate(slot, self._plan.step, self._plan.gradient_factor)
        if unit.index not in self._almost_over or self._forwards.is_open(unit.index):
            return
        if self._gradients.has_all_of_pass(unit):
            self._almost_over.discard(unit.index)
            self._after_backward(unit, unit.index, waits=False)

    # The next methods gather, hold and release units.

    def _hold(self, unit: Unit, part: Part, owners: Set[int]) -> None:
        """Gather the unit and the owners of its external parameters, and keep them gathered for `part` of the step."""
        self._lanes.poll()
        self._recorder.compute(None)
        if self._heap_trimmer is not None and unit.tile is not None:
            self._heap_trimmer.trim_if_grown()
        for index in (unit.index, *sorted(owners)):
            self._residency.hold(self._units[index], UnitHolder(unit.index, part), self._trace)
        self._recorder.compute(part.name.lower(), unit.fqn)

    def _hold_gathered(self, unit: Unit, part: Part) -> None:
        """Keep the unit and the owners of its external parameters, all of which are gathered, for `part` as well."""
        for each in (unit, *(self._units[index] for index in self._external.seen(unit))):
            self._residency.share(each, UnitHolder(unit.index, part))

    def _gather_owner_on_use(
        self, owner: Unit, parameter: ModelParameter, function: str
    ) -> AbstractContextManager[Callable[[Any], None]] | None:
        """Gather `owner` for the unit that runs, because torch was given one of the owner's released parameters.

        If no unit runs, the user's code outside of the model has used the parameter. A small one may be read so, within
        the context that is returned.

        Raises:
            ReleasedParameterError: no unit runs, and the parameter may not be read.
        """
        if self._running:
            user_unit = self._running[-1].unit
        elif self.phase is Phase.BACKWARD:
            # The backward of an autograd function that the user has written has used the parameter. The hooks do not
            # know in which unit that function runs, so the parameter's unit stays gathered as long as the root, whose
            # backward lasts longest.
            user_unit = self._root
        elif self.phase in (Phase.IDLE, Phase.FORWARD) and self._small_reads.allows(parameter, function):
            group = next(group for group in owner.groups if group.contains(parameter.tensor))
            return self._small_reads.reading(group, parameter, function)
        else:
            raise ReleasedParameterError(parameter.fqn, function)
        self._hold_for_user(user_unit, {owner.index})
        return None

    def _hold_for_user(self, user_unit: Unit, owners: set[int]) -> None:
        """Gather the `owners` of parameters that `user_unit` uses, and hold them for it, now and in its backward."""
        self._external.note(user_unit, owners)
        part = Part.BACKWARD if user_unit.index in self._in_backward else Part.FORWARD
        with outside_of_transforms():
            for index in sorted(owners):
                self._residency.hold(self._units[index], UnitHolder(user_unit.index, part), self._trace)

    def _share_with_caller(self, owner: Unit) -> None:
        """Hold `owner` for the unit that has called it, because it returns its parameters, or views of them."""
        callers = [frame.unit for frame in self._running if frame.unit is not owner]
        if callers:
            self._external.note(callers[-1], {owner.index})
            self._residency.share(owner, UnitHolder(callers[-1].index, Part.FORWARD))

    def _end_uses(self, *, keep: bool) -> None:
        """End the holds of all units. With `keep`, units may stay gathered within the limit of the residency."""
        self._running.clear()
        self._residency.release_all(keep=keep)
        self._in_backward.clear()
        self._almost_over.clear()
