"""When parameters are gathered and released: hooks on the model's modules, their outputs and their inputs.

Owns the phase's transitions, the traces and the forwards under way. Must never change what the model computes: hooks
look at tensors, they do not replace them (except for the cast of the root's floating-point inputs).

[Note: the life of a unit in a step]
Forward: gathered before the module's forward, released after it. The root surrounds everything: it is gathered while
any module outside of the units runs, and from a forward with gradients to the end of its backward.
Backward: gathered when the gradient of one of its outputs is there, or while activation checkpointing runs its forward
again. Its backward is over when the gradients of all its inputs are there; autograd runs the accumulation of parameter
gradients that are ready before anything else, so they are complete by then, but for those on a branch that does not
lead to an input. At that moment it is released, unless gradients are missing; it is reduced as reduction_order.py says.
At the end of backward all units are released and late gradients reduced.

[Note: lent units] A unit whose forward is given a released parameter of another unit borrows that unit: it is gathered
then and there, and held as long as the borrower's forward, and again its backward, needs it. So is a unit that gives
its parameters, or views of them, to its caller. What was lent is known until the step ends.

[Note: hooks and torch.compile] Hooks take leases, communicate and remember: nothing to be traced. They are disabled
for torch.compile, which puts them between its graphs, and so is lending: a compiled unit that borrows is cut in two
where it does, unless the loan is registered (`lend`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from trainer_client.errors import ConfigError, PhaseError, ReleasedParameterError, SessionEndedError, StoreError
from trainer_client.model.parameters import ModelParameter
from trainer_client.model.units import Unit
from trainer_client.recorder import Recorder
from trainer_client.step.gradients import GradientGroup, Gradients
from trainer_client.step.phases import Phase, Phases, Verb
from trainer_client.step.precision import cast_floating_inputs
from trainer_client.step.reduction_order import ReductionOrder
from trainer_client.step.residency import Holder, Part, Residency
from trainer_client.step.tensor_tree import TensorTree
from trainer_client.step.trace import Clock, Trace
from trainer_client.step.updates import Updates


@dataclass(slots=True)
class _Frame:
    """A forward under way."""

    unit: Unit
    module: nn.Module
    records: int  # how many of UnitHooks._records are older
    may_release: bool = True  # after the forward: its backward will be noticed, or there is none
    has_returned: bool = False  # the module's forward, without an error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What was there when the outermost forward began, to go back to if it fails."""

    phase: Phase
    trace: Trace
    mark: tuple[int, int]  # in the trace
    holds: frozenset[tuple[Holder, int]]
    used: int  # how many units were used since the last backward


class UnitHooks:
    """Args:
    units: the root first.
    compute_dtype: of the root's floating-point inputs; None: they stay as they are.
    clock: the job's, so that positions go on growing after a resume.
    recorder: is told the phases, and which unit's code runs.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        gradients: Gradients,
        updates: Updates,
        residency: Residency,
        reduction_order: ReductionOrder,
        compute_dtype: torch.dtype | None,
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._units = units
        self._root = units[0]
        self._gradients = gradients
        self._updates = updates
        self._residency = residency
        self._reduction_order = reduction_order
        self._compute_dtype = compute_dtype
        self._recorder = recorder
        self._phases = Phases(recorder.enter_phase)
        self._training = Trace(clock)
        self._inference = Trace(clock, amid=self._training)
        self._trace = self._inference
        self._step = 0  # that the gradients of the current backward belong to
        self._running: list[_Frame] = []
        self._lent: list[set[int]] = [set() for _ in units]  # to each unit, in this step: indices of units
        self._lent_always: list[set[int]] = [set() for _ in units]
        self._in_backward: set[int] = set()  # units whose backward has begun and is not over
        self._almost_over: set[int] = set()  # of them, those whose last gradients are being accumulated
        self._open: list[set[object]] = [set() for _ in units]  # forwards of a unit whose backward is not over
        # Those of _open that the outermost forward under way has made, with their units' indices.
        self._records: list[tuple[int, object]] = []
        self._before: _Before | None = None  # the last outermost forward; None: it is not to be undone any more
        self._used: dict[int, None] = {}  # units in the order of their first use since the last backward

    @property
    def phase(self) -> Phase:
        return self._phases.current

    def install(self) -> None:
        inside: set[nn.Module] = set()
        for unit in self._units[1:]:
            inside.update(unit.module.modules())
            self._hook(unit.module, unit, partial(self._before_unit, unit), partial(self._after_unit, unit))
        for module in self._root.module.modules():
            if module is self._root.module:
                self._hook(module, self._root, self._before_root, partial(self._after_unit, self._root))
            elif module not in inside:
                self._hook(module, self._root, None, None)
        for unit in self._units:
            self._watch_gradients(unit)
            for group in unit.groups:
                group.gather_on_use(torch.compiler.disable(partial(self._lend_on_use, unit)))

    def lend(self, module: nn.Module, parameter: nn.Parameter) -> None:
        """The unit of `module` uses `parameter` in each forward: the parameter's unit is gathered with it.

        Raises:
            ConfigError: one of them is not of the model.
        """
        lender = next((u for u in self._units for group in u.groups if group.contains(parameter)), None)
        if lender is None:
            raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} is not of this engine's model")
        # The root's modules are all of the model's.
        borrower = next((u for u in reversed(self._units) if module in set(u.module.modules())), None)
        if borrower is None:
            raise ConfigError(f"a {type(module).__name__} is not a module of this engine's model")
        if borrower is not lender:
            self._lent_always[borrower.index].add(lender.index)

    def begin_backward(self, step: int, *, reduces: bool) -> None:
        """Gradients that come from now on belong to `step`; `reduces`: see Gradients.begin_backward. A collective,
        which is not waited for."""
        self.expect_forward()
        self._phases.enter(Verb.BEGIN_BACKWARD)
        self._trace = self._training
        self._step = step
        self._gradients.begin_backward(reduces=reduces)
        self._reduction_order.begin([i for i in self._used if self._gradients.has_gradients(self._units[i])])
        self._residency.pause()
        self._gather_for_backward(self._root)

    def finish_backward(self) -> None:
        """Autograd is done. A collective."""
        for index in self._reduction_order.finish():
            self._reduce(index)
        self._end_uses(keep=True)
        self._used = {index: None for index in self._used if self._open[index]}
        self._gradients.finish_backward(self._step)
        self._recorder.compute(None)
        self._phases.enter(Verb.END_BACKWARD)

    def abort_backward(self) -> bool:
        """Give the units' memory and leases back, without a collective, because autograd or a hook has failed. Returns
        whether a backward pass was under way at all: it may have been refused."""
        if self.phase is not Phase.BACKWARD:
            return False
        self._phases.enter(Verb.FAIL_BACKWARD)
        self._reduction_order.abandon()
        # The caller reports why the backward failed: it is the cause of what the store refuses now.
        with suppress(StoreError):
            self._end_uses(keep=False)
        return True

    def expect_forward(self) -> None:
        """Take note that no forward is under way, and that the last one is not to be undone any more. A module that was
        called directly may have been interrupted by what no hook of torch hears of (KeyboardInterrupt): it failed."""
        if self._running:
            self.fail_forward()
        self._before = None

    def fail_forward(self) -> None:
        """Undo the outermost forward, which has failed: what it held is let go, and what it noted is forgotten, so that
        the next one finds what this one found. Idempotent."""
        self._running.clear()
        self._forget_records(0)
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
        # The caller reports why the forward failed: it is the cause of what the store refuses now.
        with suppress(StoreError):
            self._residency.go_back_to(before.holds)

    def fail_change(self) -> None:
        """Take note that a change of states between two steps has failed half-way."""
        self._phases.enter(Verb.FAIL_CHANGE)

    def forget_values(self) -> None:
        """Somebody changes parameters between two steps: what stayed gathered is not what it was."""
        self._residency.let_all_go()
        # Those of resident units, which are not released; see flat_group.py [Note: autocast].
        torch.clear_autocast_cache()

    def begin_step(self) -> None:
        """The parameters are about to change: nothing of them stays on the device, and no lease on them is held."""
        self.expect_forward()
        self._phases.enter(Verb.BEGIN_STEP)
        self._end_uses(keep=False)
        for index in range(len(self._units)):
            self._open[index].clear()
            self._lent[index].clear()
        self._used.clear()

    def finish_step(self) -> None:
        """The parameters are updated: the next step begins, and with it the uses that the last one saw."""
        # Those of resident units, which are not released; see flat_group.py [Note: autocast].
        torch.clear_autocast_cache()
        self._training.end()
        self._residency.pause()
        self._residency.prefetch(self._training)
        self._phases.enter(Verb.END_STEP)

    # Hooks on modules

    def _hook(
        self,
        module: nn.Module,
        unit: Unit,
        before: Callable[[Any, Any], Any] | None,
        after: Callable[[_Frame, Any], None] | None,
    ) -> None:
        """Has `before` and `after` called around the module's forward, which is noted as one of `unit`."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
            self._enter(unit, module)
            return before(args, kwargs) if before is not None else None

        def finish(_: nn.Module, __: Any, output: Any) -> None:
            if after is not None:
                after(self._running[-1], output)
            self._running[-1].has_returned = True

        def leave(_: nn.Module, __: Any, ___: Any) -> None:
            self._leave(module)

        module.register_forward_pre_hook(torch.compiler.disable(enter), with_kwargs=True)
        module.register_forward_hook(torch.compiler.disable(finish))
        module.register_forward_hook(torch.compiler.disable(leave), always_call=True)

    def _enter(self, unit: Unit, module: nn.Module) -> None:
        if self.phase in (Phase.STEP, Phase.FAILED):
            raise PhaseError(f"the model's forward was called where it cannot be: {self.phase.value}")
        outermost = not self._running
        nested = any(frame.unit is unit for frame in self._running)
        if outermost:
            self._records.clear()
        self._running.append(_Frame(unit, module, len(self._records)))
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
            self._used.setdefault(unit.index)
        if not nested:
            self._hold(unit, Part.FORWARD, self._lent_always[unit.index])

    def _leave(self, module: nn.Module) -> None:
        """The forward has ended, or raised; also if it was refused before it began."""
        if not self._running or self._running[-1].module is not module:
            return
        frame = self._running.pop()
        unit = frame.unit
        if not frame.has_returned:
            self._forget_records(frame.records)
            if not self._running and self.phase is not Phase.BACKWARD:
                self.fail_forward()
                return
        # Where the forward failed, that is what its caller is told.
        with nullcontext() if frame.has_returned else suppress(SessionEndedError):
            if all(other.unit is not unit for other in self._running):
                self._release_after_forward(unit, may_release=frame.may_release)
            if self._running:
                self._recorder.compute("forward", self._running[-1].unit.fqn)
            else:
                self._end_forward()
                self._residency.check()

    def _release_after_forward(self, unit: Unit, *, may_release: bool) -> None:
        if unit.is_root and self.phase is Phase.FORWARD:
            return
        if not may_release:
            self._hold_gathered(unit, Part.BACKWARD)
        self._residency.let_go(Holder(unit.index, Part.FORWARD), self._trace)

    def _end_forward(self) -> None:
        """The outermost forward has ended."""
        self._recorder.compute(None)
        if self._trace is self._inference:
            self._inference.end()
        self._residency.pause()
        if self.phase is Phase.INFERENCE:
            self._residency.let_all_go(keep=True)
            # Another forward of the kind, or training goes on: nobody knows.
            self._residency.prefetch(self._training, self._inference)
            self._phases.enter(Verb.END_INFERENCE)

    def _before_root(self, args: Any, kwargs: Any) -> Any:
        if self.phase is Phase.BACKWARD or self._compute_dtype is None:
            return None
        return cast_floating_inputs((args, kwargs), self._compute_dtype)

    def _before_unit(self, unit: Unit, args: Any, kwargs: Any) -> None:
        # In a recomputation, the forward that made the graph has its record already, except under reentrant
        # checkpointing, which ran it without gradients.
        if torch.is_grad_enabled() and not (self.phase is Phase.BACKWARD and self._open[unit.index]):
            self._watch_inputs(unit, TensorTree.of((args, kwargs)))

    def _after_unit(self, unit: Unit, frame: _Frame, output: Any) -> None:
        tree = TensorTree.of(output)
        if torch.is_grad_enabled():
            watched = self._watch_outputs(unit, tree)
            # Where nothing tells when the unit's backward begins it stays, unless it has none.
            has_none = bool(tree.tensors) and not tree.hides_some and not self._gradients.has_gradients(unit)
            frame.may_release = watched or has_none
        if any(group.holds_memory_of(tensor) for group in unit.groups for tensor in tree.tensors):
            self._lend_to_caller(unit)

    # Backward

    def _step_of_backward(self) -> int:
        if self.phase is not Phase.BACKWARD:
            raise PhaseError("loss.backward() was called directly: call engine.backward(loss)")
        return self._step

    def _watch_outputs(self, unit: Unit, output: TensorTree) -> bool:
        """Whether something in `output` will tell that the unit's backward begins."""
        tensors = [tensor for tensor in output.requiring_grad() if tensor.grad_fn is not None]
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, unit))
        return bool(tensors)

    def _watch_inputs(self, unit: Unit, inputs: TensorTree) -> None:
        record = object()
        self._open[unit.index].add(record)
        self._records.append((unit.index, record))
        tensors = inputs.requiring_grad()
        if not tensors:
            return  # nothing tells when its backward is over: the end of backward does
        # Those of reentrant checkpointing: their gradients are accumulated among the parameters', in any order.
        has_leaves = any(tensor.is_leaf for tensor in tensors)
        handle: RemovableHandle

        def after_backward(_: Sequence[torch.Tensor | None]) -> None:
            handle.remove()
            self._open[unit.index].discard(record)
            if not self._open[unit.index]:
                self._after_backward(unit, waits=has_leaves)

        handle = register_multi_grad_hook(tensors, after_backward)

    def _forget_records(self, since: int) -> None:
        """Expect no backward of forwards that have failed."""
        for index, record in self._records[since:]:
            self._open[index].discard(record)
        del self._records[since:]

    def _before_backward(self, unit: Unit, _: torch.Tensor) -> None:
        self._step_of_backward()
        self._gather_for_backward(unit)

    def _gather_for_backward(self, unit: Unit) -> None:
        if unit.index in self._in_backward:
            return
        self._in_backward.add(unit.index)
        self._gradients.start_backward(unit, self._step)
        self._hold(unit, Part.BACKWARD, self._lent[unit.index] | self._lent_always[unit.index])

    def _after_backward(self, unit: Unit, *, waits: bool) -> None:
        """The gradients of all inputs of the unit are there.

        Args:
            waits: for gradients that are missing, until the end of backward if they do not come.
        """
        complete = self._gradients.unit_is_complete(unit)
        if waits and not complete:
            self._almost_over.add(unit.index)
            return
        over = self._reduction_order.unit_is_over(unit.index)
        if complete:
            self._recorder.compute("backward", self._root.fqn)
            # First: the update that a reduction may begin works on what is in the store's host memory, if it is idle.
            self._in_backward.discard(unit.index)
            self._residency.let_go(Holder(unit.index, Part.BACKWARD), self._trace)
        for index in over:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        """Reduce the unit's gradients, and have the store begin with the update of each group that is final."""
        next_use = self._trace.next_use(index)
        for gradient in self._gradients.of_unit(self._units[index]):
            if self._gradients.reduce(gradient, self._step, next_use):
                self._updates.begin_early(gradient)

    def _watch_gradients(self, unit: Unit) -> None:
        """Have `_take_gradient` called as autograd finishes each gradient of the unit's parameters."""
        for gradient in self._gradients.of_unit(unit):
            for slot, parameter in enumerate(gradient.flat_group.parameters):
                frozen = not parameter.tensor.requires_grad
                # torch takes a hook of a trainable parameter only, and keeps it while the parameter is frozen.
                parameter.tensor.requires_grad_(True)
                hook = partial(self._take_gradient, unit, gradient, slot)
                parameter.tensor.register_post_accumulate_grad_hook(hook)
                parameter.tensor.requires_grad_(not frozen)

    def _take_gradient(self, unit: Unit, gradient: GradientGroup, slot: int, _: torch.Tensor) -> None:
        """Take a parameter's gradient over, and end the unit's backward if only this gradient was missing."""
        gradient.memory.start(self._step_of_backward())
        gradient.take(slot)
        if unit.index not in self._almost_over or self._open[unit.index]:
            return
        if self._gradients.unit_is_complete(unit):
            self._almost_over.discard(unit.index)
            self._after_backward(unit, waits=False)

    # Gather and lend

    def _hold(self, unit: Unit, part: Part, lent: set[int]) -> None:
        """Gathers the unit, and what it borrows."""
        self._recorder.compute(None)
        for index in (unit.index, *sorted(lent)):
            self._residency.hold(self._units[index], Holder(unit.index, part), self._trace)
        self._recorder.compute(part.name.lower(), unit.fqn)

    def _hold_gathered(self, unit: Unit, part: Part) -> None:
        for each in (unit, *(self._units[index] for index in self._lent[unit.index])):
            self._residency.share(each, Holder(unit.index, part))

    def _lend_on_use(self, lender: Unit, parameter: ModelParameter, function: str) -> None:
        """Somebody has given a released parameter of `lender` to torch."""
        if self._running:
            borrower = self._running[-1].unit
        elif self.phase is Phase.BACKWARD:
            # The backward of a function of the user's: of which unit, nobody knows. The root's lasts longest.
            borrower = self._root
        else:
            raise ReleasedParameterError(parameter.fqn, function)
        self._lent[borrower.index].add(lender.index)
        part = Part.BACKWARD if borrower.index in self._in_backward else Part.FORWARD
        self._residency.hold(lender, Holder(borrower.index, part), self._trace)

    def _lend_to_caller(self, lender: Unit) -> None:
        """What a unit returns are its parameters, or views of them, and its caller will use them."""
        callers = [frame.unit for frame in self._running if frame.unit is not lender]
        if callers:
            self._lent[callers[-1].index].add(lender.index)
            self._residency.share(lender, Holder(callers[-1].index, Part.FORWARD))

    def _end_uses(self, *, keep: bool) -> None:
        self._running.clear()
        self._residency.let_all_go(keep=keep)
        self._in_backward.clear()
        self._almost_over.clear()
