"""Hooks that torch calls in backward passes, and the hooks of forwards that install them.

This module owns the plan of a backward pass, and which units' backward is over. When it is, the unit is released and
its gradients are reduced. It must never gather a unit for a forward.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from trainer_client.base.lanes.lanes import Lanes
from trainer_client.base.recorder import Recorder
from trainer_client.errors import PhaseError, StoreError
from trainer_client.training.model.transforms import is_transformed
from trainer_client.training.model.units import Unit, UnitState
from trainer_client.training.step.gradient_group import GradientGroup
from trainer_client.training.step.gradient_hooks import AllGradientsHook, is_computed
from trainer_client.training.step.gradients import Gradients
from trainer_client.training.step.open_forwards import OpenForwards
from trainer_client.training.step.outermost_forward import OutermostForward
from trainer_client.training.step.parameter_hooks import ParameterHooks
from trainer_client.training.step.phases import Phase, Phases, Verb
from trainer_client.training.step.reduction_order import ReductionOrder
from trainer_client.training.step.residency import Part, Residency
from trainer_client.training.step.tensor_tree import TensorTree, computed_attributes
from trainer_client.training.step.trace import Trace
from trainer_client.training.step.unit_holds import Frame, UnitHolds
from trainer_client.training.step.updates import Updates

# The value that torch returns as the number of the current graph task if no backward pass runs on this thread.
NO_GRAPH_TASK = -1


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


class BackwardHooks:
    """The backward passes of one engine.

    Args:
        units: all units, the root first.
        training: the trace of forwards with gradients, and of their backward passes.
        forward: the outermost forward, which is over when a backward pass begins.
        user_backward: gives the plan of a pass when a gradient comes and `engine.backward` is not running, because the
            user has then called `loss.backward()`.
        is_running_again: returns whether a module runs only to compute a boundary again, so that no backward of this
            forward is expected.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        training: Trace,
        phases: Phases,
        holds: UnitHolds,
        forward: OutermostForward,
        forwards: OpenForwards,
        parameter_hooks: ParameterHooks,
        gradients: Gradients,
        updates: Updates,
        residency: Residency,
        lanes: Lanes,
        reduction_order: ReductionOrder,
        recorder: Recorder,
        user_backward: UserBackward,
        is_running_again: Callable[[], bool],
    ) -> None:
        self._root = units[0]
        self._training = training
        self._phases = phases
        self._holds = holds
        self._forward = forward
        self._forwards = forwards
        self._parameter_hooks = parameter_hooks
        self._gradients = gradients
        self._updates = updates
        self._residency = residency
        self._lanes = lanes
        self._reduction_order = reduction_order
        self._recorder = recorder
        self._user_backward = user_backward
        self._is_running_again = is_running_again
        # `_plan`: for which step the current backward pass is, or the last one was, and whether that pass reduces
        # gradients. `_is_users`: whether the script has started that pass by `loss.backward()`, and not by
        # `engine.backward`.
        self._plan = BackwardPlan(step=0, reduces=True)
        self._is_users = False
        # The units in `UnitHolds.in_backward` whose input gradients have all come, while autograd has yet to accumulate
        # some parameter gradients.
        self._almost_over: set[int] = set()
        # For each unit that is released after its forward: the modules of the unit, in whose attributes the forward may
        # leave results. The gradients of these results begin the unit's backward, as those of its outputs do. Empty for
        # other units.
        self._modules_of: list[Sequence[nn.Module]] = [
            () if unit.is_root or unit.state is UnitState.RESIDENT else tuple(unit.module.modules()) for unit in units
        ]

    def begin(self, plan: BackwardPlan) -> None:
        """Take note that a backward pass begins. All ranks must call this; it does not wait for them."""
        self._forward.expect_none()
        self._parameter_hooks.show_gradients()
        self._parameter_hooks.keep_last()
        self._phases.enter(Verb.BEGIN_BACKWARD)
        self._holds.trace = self._training
        self._plan = plan
        self._is_users = False
        self._gradients.begin_backward(reduces=plan.reduces, is_last=plan.is_last)
        self._reduction_order.begin(
            [use for use in self._forwards.used if self._gradients.has_gradients(self._forwards.unit_of(use))]
        )
        self._residency.pause()
        self._gather_for_backward(self._root)

    def finish(self) -> None:
        """Reduce the gradients that are left and release all units, because autograd is done. All ranks must call this.

        It can raise InPlaceChangeError.
        """
        self._residency.pause()
        self._residency.require_unchanged()
        for use in self._reduction_order.finish():
            self._reduce(use)
        self._end_holds(keep=True)
        self._forwards.end_pass()
        self._gradients.finish_backward(self._plan.step)
        self._recorder.compute(None)
        self._phases.enter(Verb.END_BACKWARD)
        self._parameter_hooks.hide_gradients()

    def abort(self) -> bool:
        """Free the units' memory and release their leases, without a collective, because autograd or a hook has failed.

        Returns:
            Whether a backward pass was under way. False if the phase did not allow a backward pass.
        """
        if self._phases.current is not Phase.BACKWARD:
            return False
        self._phases.enter(Verb.FAIL_BACKWARD)
        self._reduction_order.abandon()
        # The caller raises the error that has made the backward fail. Errors of the store at this place only follow
        # from that failure, so they are ignored.
        with suppress(StoreError):
            self._end_holds(keep=False)
        return True

    @property
    def is_lost(self) -> bool:
        """Whether the user's `loss.backward()` has ended with an error, after which autograd calls no hook.

        Such a pass still counts as under way here, because autograd calls `_finish_user_backward` only at the end of a
        pass without an error.
        """
        return (
            self._is_users
            and self._phases.current is Phase.BACKWARD
            and torch._C._current_graph_task_id() == NO_GRAPH_TASK
        )

    def before_unit(self, unit: Unit, use: int, args: Any, kwargs: Any) -> None:
        """Watch the gradients of the unit's inputs, because its backward is over when all of them have come."""
        # In a recomputation no hooks are set on the inputs of the unit, because the forward that made the graph has
        # recorded the use already. Reentrant checkpointing is the exception, because it has run that forward without
        # gradients. A forward that only computes a boundary again has no backward, so hooks on its inputs would never
        # be called and would keep the inputs alive.
        is_recomputed = self._phases.current is Phase.BACKWARD and (
            self._forwards.is_open(use) or self._is_running_again()
        )
        if torch.is_grad_enabled() and not is_recomputed and not is_transformed():
            self._watch_inputs(unit, use, TensorTree.of((args, kwargs)))

    def after_unit(self, unit: Unit, frame: Frame, output: Any) -> None:
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
            self._holds.share_with_caller(unit)

    def require(self) -> None:
        """Begin a backward pass of the user's if none is under way, because autograd has called a hook.

        Raises:
            PhaseError: the engine is in a phase in which no backward pass can begin.
        """
        if self._phases.current is Phase.BACKWARD:
            return
        self._phases.check(Verb.BEGIN_BACKWARD)
        self.begin(self._user_backward.begin_for_user())
        self._is_users = True
        # Autograd calls `_finish_user_backward` at the end of the pass, before `loss.backward()` returns.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_user_backward)

    def _finish_user_backward(self) -> None:
        """End a backward pass that the user has started. All ranks must call this."""
        self.finish()
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
            if self._holds.is_amid_forward:
                return False
            self._forwards.end(use, forward)
            if not self._forwards.is_open(use):
                self._after_backward(unit, use, waits=has_leaves)
            elif unit.tile is not None:
                self._holds.release_after_backward(unit)
            return True

        forward.hook = ref(AllGradientsHook(tensors, after_backward))

    def _before_backward(self, unit: Unit, _: torch.Tensor) -> None:
        """Begin the unit's backward, because the gradient of one of its results has come."""
        if self._holds.is_amid_forward:
            self._holds.hold_for_user(self._holds.running[-1].unit, {unit.index, *self._holds.external.owners_of(unit)})
            return
        self.require()
        if torch.is_grad_enabled():
            # Autograd makes a graph of this backward pass (create_graph=True), and a later pass of the same step may
            # run backward through that graph. No hook tells when that later pass needs this unit. So the unit is noted
            # as one that the root needs, and stays gathered as long as the root does in each later pass of the step.
            self._holds.external.note(self._root, {unit.index, *self._holds.external.owners_of(unit)})
        self._gather_for_backward(unit)

    def _gather_for_backward(self, unit: Unit) -> None:
        """Gather the unit for its backward, and ask for the memory of its gradients. Idempotent."""
        if unit.index in self._holds.in_backward:
            return
        self._holds.in_backward.add(unit.index)
        self._gradients.start_backward(unit, self._plan.step)
        self._holds.hold(unit, Part.BACKWARD, self._holds.external.owners_of(unit))

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
            self._holds.release_after_backward(unit)
        for each in over:
            self._reduce(each)

    def _reduce(self, use: int) -> None:
        """Reduce the unit's gradients, and have the store begin with the update of each group that is final."""
        unit = self._forwards.unit_of(use)
        next_use = self._holds.trace.next_use(unit.index)
        comes_again = self._forwards.is_another_open(use)
        for gradient in self._gradients.of_unit(unit):
            if self._gradients.reduce(gradient, self._plan.step, next_use) and not comes_again:
                self._gradients.hand_over(gradient, partial(self._updates.begin_early, gradient))
        self._lanes.poll()

    def accumulate_gradient(self, unit: Unit, gradient: GradientGroup, slot: int, tensor: torch.Tensor) -> None:
        """Take a parameter's gradient over, and end the unit's backward if only this gradient was missing.

        Raises:
            PhaseError: a forward is under way, or the engine is in a phase in which no backward pass can begin.
        """
        if self._holds.is_amid_forward:
            tensor.grad = None
            raise PhaseError(
                "backward() was called while a forward of the model is under way: within a forward, call "
                "torch.autograd.grad; after a forward that was interrupted, call engine.backward(loss)"
            )
        self.require()
        gradient.accumulate(slot, self._plan.step, self._plan.gradient_factor)
        if unit.index not in self._almost_over or self._forwards.is_open(unit.index):
            return
        if self._gradients.has_all_of_pass(unit):
            self._almost_over.discard(unit.index)
            self._after_backward(unit, unit.index, waits=False)

    def _end_holds(self, *, keep: bool) -> None:
        """End the holds of all units. With `keep`, units may stay gathered within the limit of the residency."""
        self._holds.end_all(keep=keep)
        self._almost_over.clear()
