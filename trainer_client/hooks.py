"""When parameters are gathered and released: hooks on the units' modules, their outputs and their inputs.

Owns the phase and the traces. Must never change what the model computes: hooks look at tensors, they do not replace
them (except for the cast of the root's floating-point inputs).

[Note: the life of a unit in a step]
Forward: gathered before the module's forward, released after it. The root stays until the end of backward: its
parameters surround everything, and many are used outside of any block.
Backward: gathered when the gradient of one of its outputs is there, or when activation checkpointing runs its forward
again. Its backward is over when the gradients of all its inputs are there; autograd runs the accumulation of parameter
gradients that are ready before anything else, so they are complete by then, but for those on a branch that does not
lead to an input. At that moment, which all ranks see alike, its gradients are reduced; it is released if none is
missing, else at the end of backward, when all units are released and late gradients reduced.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from trainer_client.gradients import Gradients
from trainer_client.link.rank_store import RankStore, Slab
from trainer_client.precision import cast_floating_inputs
from trainer_client.trace import Clock, Trace
from trainer_client.units import Unit, UnitState


class Phase(enum.Enum):
    """Where in a step the engine is."""

    IDLE = enum.auto()
    """Between steps, or after an inference forward; no unit is gathered."""

    INFERENCE = enum.auto()
    """In a forward without gradients."""

    FORWARD = enum.auto()
    """In, or after, a forward with gradients; the root is gathered."""

    BACKWARD = enum.auto()
    """In `engine.backward`; forwards that run now are recomputations."""

    FAILED = enum.auto()
    """A backward raised: the step's gradients are incomplete on this rank, and the step cannot be made any more."""


class UnitHooks:
    """Args:
    units: the root first.
    compute_dtype: of the root's floating-point inputs; None: they stay as they are.
    clock: the job's, so that positions go on growing after a resume.
    prefetch_bytes: how much of this rank's shards the store shall hold ready ahead of their use.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        gradients: Gradients,
        store: RankStore,
        compute_dtype: torch.dtype | None,
        clock: Clock,
        prefetch_bytes: int,
    ) -> None:
        self.phase = Phase.IDLE
        self._units = units
        self._gradients = gradients
        self._store = store
        self._compute_dtype = compute_dtype
        self._prefetch_bytes = prefetch_bytes
        self._training = Trace(clock)
        self._inference = Trace(clock)
        self._trace = self._inference
        self._step = 0  # that the gradients of the current backward belong to
        self._in_backward: set[int] = set()  # units whose backward has begun and is not over
        self._open_forwards = [0] * len(units)  # forwards of a unit whose backward is not over

    def install(self) -> None:
        self._gradients.install(self._step_of_backward)
        for unit in self._units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))

    def begin_backward(self, step: int, *, reduces: bool) -> None:
        """Gradients that come from now on belong to `step`; `reduces`: see Gradients.begin_backward."""
        if self.phase is Phase.BACKWARD:
            raise RuntimeError("engine.backward() was called within a backward pass")
        self.phase = Phase.BACKWARD
        self._trace = self._training
        self._step = step
        self._gradients.begin_backward(reduces=reduces)
        self._gather_for_backward(self._units[0])

    def finish_backward(self) -> None:
        """Autograd is done. A collective."""
        self._release_all()
        self._gradients.finish_backward(self._step)
        self.phase = Phase.IDLE

    def abort_backward(self) -> None:
        """Autograd or a hook failed: gives memory and leases back, without a collective."""
        self._release_all()
        self.phase = Phase.FAILED

    def finish_step(self) -> None:
        """The parameters are updated: the next step begins, and with it the uses that the last one saw."""
        self._training.end()
        self._prefetch(self._training)

    def _step_of_backward(self) -> int:
        if self.phase is not Phase.BACKWARD:
            raise RuntimeError("loss.backward() was called directly: call engine.backward(loss)")
        return self._step

    # Forward

    def _before_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        recomputes = self.phase is Phase.BACKWARD
        if unit.is_root and not recomputes:
            self._begin_root_forward()
            if self._compute_dtype is not None:
                args, kwargs = cast_floating_inputs((args, kwargs), self._compute_dtype)
        if recomputes:
            self._gather_for_backward(unit)
        else:
            self._use(unit)
        # In a recomputation, the forward that made the graph has its record already, except under reentrant
        # checkpointing, which ran it without gradients.
        if torch.is_grad_enabled() and not (recomputes and self._open_forwards[unit.index]):
            self._watch_inputs(unit, args, kwargs)
        return args, kwargs

    def _after_forward(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        watched = torch.is_grad_enabled() and self._watch_outputs(unit, output)
        if self.phase is Phase.BACKWARD:
            return
        if unit.is_root:
            self._finish_root_forward()
        elif self._trace.next_unit() != unit.index and (watched or not torch.is_grad_enabled()):
            unit.release()
        # A unit that is used again at once (the last of the forward is the first of the backward) stays, and so does
        # one whose outputs hide their tensors: nothing would tell when its backward begins.

    def _begin_root_forward(self) -> None:
        if torch.is_grad_enabled():
            self.phase = Phase.FORWARD
            self._trace = self._training
        else:
            if self.phase is Phase.IDLE:
                self.phase = Phase.INFERENCE
            self._trace = self._inference

    def _finish_root_forward(self) -> None:
        if self._trace is self._inference:
            self._inference.end()
        if self.phase is Phase.INFERENCE:
            self._release_all()
            self.phase = Phase.IDLE

    # Backward

    def _watch_outputs(self, unit: Unit, output: Any) -> bool:
        """Whether something in `output` will tell that the unit's backward begins."""
        tensors = [t for t in _tensors(output) if t.requires_grad and t.grad_fn is not None]
        for tensor in tensors:
            tensor.register_hook(partial(self._before_backward, unit))
        return bool(tensors)

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> None:
        if unit.is_root:
            return
        self._open_forwards[unit.index] += 1
        inputs = [t for t in _tensors((args, kwargs)) if t.requires_grad]
        if not inputs:
            return  # nothing tells when its backward is over: the end of backward does
        handle: RemovableHandle

        def after_backward(_: Sequence[torch.Tensor | None]) -> None:
            handle.remove()
            self._after_backward(unit)

        handle = register_multi_grad_hook(inputs, after_backward)

    def _before_backward(self, unit: Unit, _: torch.Tensor) -> None:
        self._step_of_backward()
        self._gather_for_backward(unit)

    def _gather_for_backward(self, unit: Unit) -> None:
        if unit.index in self._in_backward:
            return
        self._in_backward.add(unit.index)
        self._gradients.start_backward(unit, self._step)
        self._use(unit)

    def _after_backward(self, unit: Unit) -> None:
        self._open_forwards[unit.index] -= 1
        if self._open_forwards[unit.index] != 0:
            return
        complete = self._gradients.unit_is_complete(unit)
        self._gradients.reduce_unit(unit, self._step)
        if complete:
            unit.release()
            self._in_backward.discard(unit.index)

    # Gather, prefetch, release

    def _use(self, unit: Unit) -> None:
        trace = self._trace
        unit.start_gather(trace.use(unit.index))
        unit.wait_gather(trace.next_use(unit.index))
        following = trace.next_unit()
        if following is None:
            return
        # The next unit's lease is asked for now, so that its bytes are there when it is used. Never beyond the end of
        # the step: its version would be the one before the update.
        self._units[following].start_gather(next(trace.upcoming())[1])
        self._prefetch(trace)

    def _prefetch(self, trace: Trace) -> None:
        if wants := list(self._window(trace)):
            self._store.prefetch(wants)

    def _window(self, trace: Trace) -> Iterator[tuple[Slab, int]]:
        """What is used next, up to the byte budget."""
        budget = self._prefetch_bytes
        wanted: set[int] = set()
        for index, position in trace.upcoming():
            unit = self._units[index]
            if index in wanted or unit.state is not UnitState.SHARDED:
                continue
            wanted.add(index)
            budget -= unit.chunk_bytes
            if budget < 0:
                return
            yield from ((slab, position) for slab in unit.slabs())

    def _release_all(self) -> None:
        for unit in self._units:
            unit.release()
        self._in_backward.clear()
        self._open_forwards = [0] * len(self._units)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
