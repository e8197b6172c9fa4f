"""Gradients on their way to the optimizer: from the parameters, over the ranks, to this rank's part of the mean.

Owns the memory of that part (leased from the store, or the device's) from the first micro-batch of a step to its
update, the whole gradients of backwards that do not reduce, and which parameter has a gradient.
Must never let the ranks disagree about a reduction: what is reduced, and when, follows from events that every rank sees
(a unit's backward is over) or from an agreement at the end of the backward pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import StoreError, TrainerClientError
from trainer_client.model.flat_group import FlatGroup
from trainer_client.model.states import PlacedStates
from trainer_client.model.units import Unit
from trainer_client.ranks.collectives import Collectives
from trainer_client.step.early_update import EarlyUpdate
from trainer_client.step.gradient_memory import DeviceMemory, GradientMemory, LeasedMemory
from trainer_client.step.norms import Norms
from trainer_client.transport.planes import LeasedBytes
from trainer_client.transport.rank_store import RankStore


class ReductionSchedule(enum.Enum):
    """Which backward passes of a step reduce gradients over the ranks."""

    MICRO_BATCH = enum.auto()
    """Each: between micro-batches a rank holds its part of the mean."""

    BOUNDARY = enum.auto()
    """The last one: until then a rank holds the whole sum of its own gradients, on its device. What DDP does under
    `no_sync`: less traffic, more memory."""

    @classmethod
    def of(cls, config: TrainingConfig) -> ReductionSchedule:
        """By default as DeepSpeed: stages that shard gradients reduce each micro-batch."""
        chosen = config.paramserver.gradient_reduction
        if chosen == "auto":
            chosen = "micro_batch" if config.zero_optimization.stage >= 2 else "boundary"
        return cls[chosen.upper()]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """The size of a step's gradient.

    Attributes:
        total: 0-D fp32, the 2-norm over all parameters and ranks, of the gradients as they are (scaled by the loss
            scale).
        present: for each parameter of the model, whether any rank has a gradient for it.
    """

    total: torch.Tensor
    present: Sequence[bool]


class GradientGroup:
    """The gradients of one trainable flat group.

    Attributes:
        missing: parameters without a gradient since this backward began, or the unit's last reduction in it.
        present: parameters with a gradient in this step.
        next_use: the position at which the parameters are needed next, as far as it is known.
        early: the update that has begun with this gradient, before the step.
    """

    def __init__(
        self,
        group: FlatGroup,
        memory: GradientMemory,
        reduction_dtype: torch.dtype,
        collectives: Collectives,
        norms: Norms,
    ) -> None:
        self.flat_group = group
        self.memory = memory
        self.missing = set(range(len(group.parameters)))
        self.present: set[int] = set()
        self.next_use = 0
        self.early: EarlyUpdate | None = None
        self._norm = norms
        self._norms: torch.Tensor | None = None  # of `chunk` as it is
        self._reduction_dtype = reduction_dtype
        self._collectives = collectives
        self._full: torch.Tensor | None = None  # this rank's unreduced gradient, world size > 1
        self._unreduced: set[int] = set()  # parameters with a gradient in it
        self._reduced = False  # whether `chunk` holds a sum of this step already, world size > 1

    @property
    def is_dirty(self) -> bool:
        """Whether gradients wait for a reduction."""
        return bool(self._unreduced)

    @property
    def is_complete(self) -> bool:
        """Whether no gradient is missing; that of a parameter which is frozen for a while is not."""
        return not any(self.flat_group.parameters[slot].tensor.requires_grad for slot in self.missing)

    @property
    def has_all(self) -> bool:
        """Whether every parameter that is trained now has a gradient in this step."""
        parameters = self.flat_group.parameters
        return all(slot in self.present or not p.tensor.requires_grad for slot, p in enumerate(parameters))

    @property
    def is_frozen(self) -> bool:
        """Whether all parameters are frozen for a while: no gradient will come."""
        return not any(parameter.tensor.requires_grad for parameter in self.flat_group.parameters)

    @property
    def chunk(self) -> torch.Tensor:
        """This rank's part of the gradient: [layout.chunk] of the group's gradient dtype, where its memory is."""
        return self.memory.chunk

    def expect_all(self) -> None:
        """Every parameter's gradient is to come."""
        self.missing = set(range(len(self.flat_group.parameters)))

    def begin_change(self) -> None:
        """The gradient is about to change: what was concluded from it is undone."""
        self._norms = None
        if self.early is not None:
            self.early.withdraw()
            self.early = None

    @torch.no_grad()
    def take(self, slot: int) -> None:
        """Takes a parameter's gradient over, and with it `.grad`."""
        parameter = self.flat_group.parameters[slot]
        gradient = parameter.tensor.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise TrainerClientError(
                f"parameter {parameter.fqn} has a {gradient.layout} gradient: make it dense (Embedding(sparse=False))"
            )
        parameter.tensor.grad = None
        self.begin_change()
        place = self.flat_group.layout.slots[slot]
        first, last = place.position, place.position + place.numel
        if self._collectives.world_size == 1:
            _put(self.chunk[first:last].view(parameter.shape), gradient, add=slot in self.present)
        else:
            if self._full is None:
                self._full = self._zeros()
            _put(self._full[first:last].view(parameter.shape), gradient, add=slot in self._unreduced)
            self._unreduced.add(slot)
        self.missing.discard(slot)
        self.present.add(slot)

    @torch.no_grad()
    def reduce(self) -> None:
        """Adds the mean over ranks to this rank's part; a missing gradient counts as zeros. A collective."""
        if self._collectives.world_size == 1:
            return
        self.begin_change()
        device, dtype = self._collectives.device, self._reduction_dtype
        full = self._zeros() if self._full is None else self._full
        self._full = None
        self._unreduced.clear()
        direct = not self._reduced and self.chunk.device == device and self.chunk.dtype == dtype
        mean = self.chunk if direct else torch.empty(self.flat_group.layout.chunk, dtype=dtype, device=device)
        what = f"the reduction of {self.flat_group.unit}"
        self._collectives.reduce_scatter_mean(mean, full.to(dtype), what)
        if not direct:
            _put(self.chunk, mean, add=self._reduced)
        self._reduced = True

    def _zeros(self) -> torch.Tensor:
        group = self.flat_group
        return torch.zeros(group.layout.numel, dtype=group.gradient_dtype, device=self._collectives.device)

    def norms(self) -> tuple[list[int], torch.Tensor]:
        """The indices [n] of the parameters of which this rank has a shard, and the 2-norm [n] of each in fp32."""
        shards = self.flat_group.shards
        if self._norms is None:
            chunk = self.chunk
            norms = [self._norm.of(chunk[shard.position : shard.position + shard.numel]) for shard in shards]
            self._norms = torch.stack(norms).cpu() if norms else torch.empty(0)
        return [self.flat_group.parameters[shard.slot].index for shard in shards], self._norms

    def take_lease(self, step: int) -> LeasedBytes:
        """The step is over: the gradient in leased memory, and nothing of the step stays here."""
        leased = self.memory.lease(step)
        self.finish()
        return leased

    def abandon(self) -> None:
        """Undo the update that has begun with this gradient, and give the gradient's memory back, after a failure that
        the caller reports. Where the store refuses to undo it, it has lost this session or the step, and the update
        with it."""
        with suppress(StoreError):
            self.begin_change()
        self.memory.abandon()
        self.finish()

    def finish(self) -> None:
        """The step is over: nothing of it stays here."""
        self.memory.give_back()
        self.early = None
        self._norms = None
        self.present.clear()
        self._full = None
        self._unreduced.clear()
        self._reduced = False


class Gradients:
    """All gradients of the model.

    Args:
        states: of all groups.
        reduction_dtype: None: each group's own.
        exact_norms: see Norms.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        states: Iterable[PlacedStates],
        reduction_dtype: torch.dtype | None,
        store: RankStore,
        collectives: Collectives,
        *,
        exact_norms: bool,
    ) -> None:
        self._collectives = collectives
        homes = {state.group.name: state.placement.gradients for state in states}
        norms = Norms(exact=exact_norms)

        def make(group: FlatGroup) -> GradientGroup:
            memory = (DeviceMemory if homes[group.name] is Home.DEVICE else LeasedMemory)(group, store)
            return GradientGroup(group, memory, reduction_dtype or group.dtype, collectives, norms)

        self._of_unit = {unit.index: [make(group) for group in unit.groups if group.trainable] for unit in units}
        self._groups = [group for groups in self._of_unit.values() for group in groups]
        # Is told of each group whose gradient will not change any more in this step, as far as anybody knows.
        self.on_final: Callable[[GradientGroup], None] = lambda _: None
        self._parameters = 1 + max((p.index for u in units for g in u.groups for p in g.parameters), default=-1)
        self._reduces = True  # whether the current backward does
        self._owes_reduction = False  # whether a backward of this step did not

    def install(self, step_of_backward: Callable[[], int], taken: Callable[[int], None]) -> None:
        """Takes gradients over as autograd finishes them, for the step that `step_of_backward` names or refuses.

        Args:
            taken: is told the index of the unit of each gradient.
        """

        def hook(unit: int, group: GradientGroup, slot: int, _: torch.Tensor) -> None:
            group.memory.start(step_of_backward())
            group.take(slot)
            taken(unit)

        for unit, group in ((unit, group) for unit, groups in self._of_unit.items() for group in groups):
            for slot, parameter in enumerate(group.flat_group.parameters):
                frozen = not parameter.tensor.requires_grad
                # torch takes a hook of a trainable parameter only, and keeps it while the parameter is frozen.
                parameter.tensor.requires_grad_(True)
                parameter.tensor.register_post_accumulate_grad_hook(partial(hook, unit, group, slot))
                parameter.tensor.requires_grad_(not frozen)

    def begin_backward(self, *, reduces: bool) -> None:
        """A backward pass begins. Without `reduces`, which all ranks must give alike, its gradients stay whole on this
        rank's device until one that has it, or `complete`."""
        self._reduces = reduces
        for group in self._groups:
            group.expect_all()

    def has_gradients(self, unit: Unit) -> bool:
        """Whether anything of the unit is trained now."""
        return not all(group.is_frozen for group in self._of_unit[unit.index])

    def start_backward(self, unit: Unit, step: int) -> None:
        """The unit's backward begins: its gradients will need memory."""
        for group in self._of_unit[unit.index]:
            if not group.is_frozen:
                group.memory.start(step)

    def unit_is_complete(self, unit: Unit) -> bool:
        """Whether every trainable parameter of the unit has its gradient."""
        return all(group.is_complete for group in self._of_unit[unit.index])

    def reduce_unit(self, unit: Unit, step: int, next_use: int | None) -> None:
        """The unit's backward is over, on every rank. A collective.

        Args:
            next_use: the position at which its parameters are needed next, if it is known.
        """
        for group in self._of_unit[unit.index]:
            group.expect_all()
            if self._reduces and not group.is_frozen:
                group.memory.start(step)
                group.reduce()
                group.next_use = next_use or 0
                if group.has_all:
                    self.on_final(group)

    def finish_backward(self, step: int) -> None:
        """Reduces what came late or outside of a tracked backward, on any rank. A collective."""
        if self._reduces:
            self._reduce_dirty(step, "the end of a backward pass")
        self._owes_reduction = not self._reduces

    def complete(self, step: int) -> None:
        """Reduces what is not reduced yet, at the end of a step. A collective."""
        if self._owes_reduction:
            self._reduce_dirty(step, "the end of a step")
            self._owes_reduction = False

    def _reduce_dirty(self, step: int, what: str) -> None:
        dirty = self._collectives.any_rank([group.is_dirty for group in self._groups], what)
        for group, is_dirty in zip(self._groups, dirty, strict=True):
            if is_dirty:
                group.memory.start(step)
                group.reduce()

    def chunk_of(self, group: FlatGroup, slot: int) -> torch.Tensor | None:
        """This rank's part [layout.chunk] of a group's gradient so far, as it is (scaled), in its memory, if the
        parameter in `slot` has one there. (Over several ranks one that no rank has is zeros, or None.)

        Raises:
            RuntimeError: it is not reduced over the ranks yet.
        """
        if self._owes_reduction:
            raise RuntimeError("gradients are reduced over the ranks in the last backward() of a step: look after that")
        found = self._find(group)
        alone = self._collectives.world_size == 1
        is_there = found is not None and found.memory.is_there and (not alone or slot in found.present)
        return found.chunk if found is not None and is_there else None

    def begin_change(self, group: FlatGroup) -> None:
        """Somebody is about to write to a group's gradient."""
        if (found := self._find(group)) is not None:
            found.begin_change()

    @property
    def updated_early(self) -> list[GradientGroup]:
        """The groups whose update has begun before the step."""
        return [group for group in self._groups if group.early is not None]

    def is_present(self, group: FlatGroup, slot: int) -> bool:
        """Whether a gradient of the parameter in `slot` has come on this rank in this step."""
        found = self._find(group)
        return found is not None and slot in found.present

    def _find(self, group: FlatGroup) -> GradientGroup | None:
        return next((found for found in self._groups if found.flat_group is group), None)

    def norm(self) -> GradientNorm:
        """The global norm; with exact norms bit for bit that of `torch.nn.utils.clip_grad_norm_` at world size 1. A
        collective."""
        norms = torch.zeros(self._parameters, dtype=torch.float32)
        present = torch.zeros(self._parameters, dtype=torch.float32)
        for group in self._groups:
            if not group.memory.is_there:
                continue
            indices, values = group.norms()
            norms[indices] = values
            for slot in group.present:
                present[group.flat_group.parameters[slot].index] = 1.0
        rows = self._collectives.gather_rows(torch.cat((norms, present)), "the gradient norm").cpu()
        anywhere = rows[:, self._parameters :].amax(dim=0) > 0
        # A zero for a parameter without gradient would not change the sum, but the order in which it is rounded.
        total = torch.linalg.vector_norm(rows[:, : self._parameters][:, anywhere])
        return GradientNorm(total=total, present=anywhere.tolist())

    def hand_over(self, updated: Sequence[bool]) -> Iterator[GradientGroup]:
        """The groups with a parameter that is `updated` in this step, in forward order; whoever takes them finishes
        them."""
        for group in self._groups:
            if any(updated[parameter.index] for parameter in group.flat_group.parameters):
                yield group
            else:
                group.begin_change()
                group.finish()

    def discard(self) -> None:
        """Gives the memory of a step back that is not made."""
        for group in self._groups:
            group.finish()

    def abandon(self) -> None:
        """Give everything back after a failure: updates that have begun, and all memory. Raises no StoreError."""
        for group in self._groups:
            group.abandon()


def _put(target: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
    if add:
        target.add_(values.to(target.device))
    else:
        target.copy_(values)
