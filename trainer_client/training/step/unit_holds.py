"""The units that the forwards and the backward pass under way hold gathered, and for which of them.

This module owns the forwards under way, and gathers a unit when a module of it begins, when its backward begins, or
when another unit uses a parameter of it. It must never reduce a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer_client.base.lanes.lanes import Lanes
from trainer_client.base.recorder import Recorder
from trainer_client.errors import ReleasedParameterError
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.transforms import outside_of_transforms
from trainer_client.training.model.units import Unit
from trainer_client.training.step.external_parameters import ExternalParameters
from trainer_client.training.step.heap_trimmer import HeapTrimmer
from trainer_client.training.step.phases import Phase, Phases
from trainer_client.training.step.residency import Part, Residency, UnitHolder
from trainer_client.training.step.small_reads import SmallReads
from trainer_client.training.step.trace import Trace


@dataclass(slots=True)
class Frame:
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


class UnitHolds:
    """The holds of units within a pass.

    Args:
        units: all units, the root first.
        trace: the trace before the first pass.
        phases: the phase of the engine.
        small_reads: the parameters that the script may read outside of forwards.

    Attributes:
        external: which units own the external parameters of which units.
        trace: the trace of the pass under way, or of the last one.
        running: the forwards under way, the outermost one first.
        in_backward: the units whose backward has begun and is not over.
        engine: the engine, which the hooks on the model and on tensors keep alive by this object; None: it has left
            the model.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        trace: Trace,
        phases: Phases,
        residency: Residency,
        lanes: Lanes,
        recorder: Recorder,
        small_reads: SmallReads,
    ) -> None:
        self.external = ExternalParameters(units)
        self.trace = trace
        self.running: list[Frame] = []
        self.in_backward: set[int] = set()
        self.engine: object = None
        self._units = units
        self._phases = phases
        self._residency = residency
        self._lanes = lanes
        self._recorder = recorder
        self._small_reads = small_reads
        # Returns free heap memory to the kernel between uses of tiles. None if no tile computes on the CPU.
        tiles = (unit for unit in units if unit.tile is not None)
        on_cpu = any(group.device.type == "cpu" for unit in tiles for group in unit.groups)
        self._heap_trimmer = HeapTrimmer() if on_cpu else None

    @property
    def is_amid_forward(self) -> bool:
        """Whether a forward is under way, to which gradients that come belong; see backward_hooks.py."""
        return bool(self.running) and self._phases.current is not Phase.BACKWARD

    def hold(self, unit: Unit, part: Part, owners: Set[int]) -> None:
        """Gather the unit and the owners of its external parameters, and keep them gathered for `part` of the step."""
        self._lanes.poll()
        self._recorder.compute(None)
        if self._heap_trimmer is not None and unit.tile is not None:
            self._heap_trimmer.trim_if_grown()
        for index in (unit.index, *sorted(owners)):
            self._residency.hold(self._units[index], UnitHolder(unit.index, part), self.trace)
        self._recorder.compute(part.name.lower(), unit.fqn)

    def hold_gathered(self, unit: Unit, part: Part) -> None:
        """Keep the unit and the owners of its external parameters, all of which are gathered, for `part` as well."""
        for each in (unit, *(self._units[index] for index in self.external.seen(unit))):
            self._residency.share(each, UnitHolder(unit.index, part))

    def release_after_backward(self, unit: Unit) -> None:
        """End the unit's hold for its backward, and release the unit unless another part of the step needs it."""
        self.in_backward.discard(unit.index)
        self._residency.release(UnitHolder(unit.index, Part.BACKWARD), self.trace)

    def gather_owner_on_use(
        self, owner: Unit, parameter: ModelParameter, function: str
    ) -> AbstractContextManager[Callable[[Any], None]] | None:
        """Gather `owner` for the unit that runs, because torch was given one of the owner's released parameters.

        If no unit runs, the user's code outside of the model has used the parameter. A small one may be read so, within
        the context that is returned.

        Raises:
            ReleasedParameterError: no unit runs, and the parameter may not be read.
        """
        if self.running:
            user_unit = self.running[-1].unit
        elif self._phases.current is Phase.BACKWARD:
            # The backward of an autograd function that the user has written has used the parameter. The hooks do not
            # know in which unit that function runs, so the parameter's unit stays gathered as long as the root, whose
            # backward lasts longest.
            user_unit = self._units[0]
        elif self._phases.current in (Phase.IDLE, Phase.FORWARD) and self._small_reads.allows(parameter, function):
            group = next(group for group in owner.groups if group.contains(parameter.tensor))
            return self._small_reads.reading(group, parameter, function)
        else:
            raise ReleasedParameterError(parameter.fqn, function)
        self.hold_for_user(user_unit, {owner.index})
        return None

    def hold_for_user(self, user_unit: Unit, owners: set[int]) -> None:
        """Gather the `owners` of parameters that `user_unit` uses, and hold them for it, now and in its backward."""
        self.external.note(user_unit, owners)
        part = Part.BACKWARD if user_unit.index in self.in_backward else Part.FORWARD
        with outside_of_transforms():
            for index in sorted(owners):
                self._residency.hold(self._units[index], UnitHolder(user_unit.index, part), self.trace)

    def share_with_caller(self, owner: Unit) -> None:
        """Hold `owner` for the unit that has called it, because it returns its parameters, or views of them."""
        callers = [frame.unit for frame in self.running if frame.unit is not owner]
        if callers:
            self.external.note(callers[-1], {owner.index})
            self._residency.share(owner, UnitHolder(callers[-1].index, Part.FORWARD))

    def end_all(self, *, keep: bool) -> None:
        """End the holds of all units. With `keep`, units may stay gathered within the limit of the residency."""
        self.running.clear()
        self._residency.release_all(keep=keep)
        self.in_backward.clear()
