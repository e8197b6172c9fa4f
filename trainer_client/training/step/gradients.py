"""The gradients of the model: which groups are reduced, handed over and parked, and when.

This module must never let the ranks disagree about a reduction: which groups are reduced, and when, follows from events
that every rank sees (a unit's backward is over) or from an agreement at the end of the backward pass. gradient_group.py
owns the gradient of each group.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trainer_client.base.device import memory_bytes
from trainer_client.base.lanes.lanes import Act, Lanes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.model.units import Unit
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step.early_updates import EarlyUpdates
from trainer_client.training.step.gradient_group import GradientGroup
from trainer_client.training.step.gradient_memory import LeasedMemory, LocalMemory, StagedMemory, nothing
from trainer_client.training.step.norms import Norms

# The share of an accelerator's free memory that sums of gradients may take between the micro-batches of a step. If they
# need more, each sum leaves the device after a micro-batch and comes back in the next one.
_SHARE_FOR_SUMS = 0.5


class ReductionSchedule(enum.Enum):
    """Which backward passes of a step reduce gradients over the ranks."""

    MICRO_BATCH = enum.auto()
    """Every backward pass reduces. Between micro-batches a rank holds its part of the mean."""

    BOUNDARY = enum.auto()
    """Only the last backward pass of a step reduces. Until then a rank holds the whole sum of its own gradients on its
    device, as DDP does under `no_sync`: there is less traffic, and more memory is used."""

    @classmethod
    def of(cls, config: TrainingConfig) -> ReductionSchedule:
        """Return the schedule of the config.

        The default is DeepSpeed's: stages that shard gradients reduce each micro-batch.
        """
        chosen = config.paramserver.gradient_reduction
        if chosen == "auto":
            chosen = "micro_batch" if config.zero_optimization.stage >= 2 else "boundary"
        return cls[chosen.upper()]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """The size of a step's gradient.

    Attributes:
        total: 0-D fp32, the 2-norm over all parameters and ranks. The gradients are as backward made them, so they are
            scaled by the loss scale.
        present: for each parameter of the model, whether any rank has a gradient for it.
    """

    total: torch.Tensor
    present: Sequence[bool]


class Gradients:
    """All gradients of the model, which the hooks bring, and which the step reads, clips and hands over.

    Args:
        states: the states of all groups.
        early_updates: the early updates, which this object withdraws before their gradients change.
        exact_norms: whether norms have torch's bits; see Norms.
        mean: whether a step's gradient is the mean of the ranks' gradients; False: their sum.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        states: Iterable[PlacedStates],
        early_updates: EarlyUpdates,
        store: RankStore,
        collectives: Collectives,
        lanes: Lanes,
        *,
        exact_norms: bool,
        mean: bool,
    ) -> None:
        self._collectives = collectives
        self._early_updates = early_updates
        homes = {state.group.name: state.placement.gradients for state in states}
        on_host = collectives.device.type == "cpu"
        # On an accelerator all norms of gradients are computed exactly, whether or not the config asks for exact norms.
        norms = self._norms = Norms(exact=exact_norms or not on_host)
        in_store = LeasedMemory if on_host else StagedMemory

        def make(group: FlatGroup) -> GradientGroup:
            memory = (LocalMemory if homes[group.name] is Home.DEVICE else in_store)(group, store, lanes)
            return GradientGroup(
                group, memory, early_updates, store.gradients.parking, collectives, lanes, norms, mean=mean
            )

        self._of_unit = {unit.index: [make(group) for group in unit.groups if group.trainable] for unit in units}
        self._groups = [group for groups in self._of_unit.values() for group in groups]
        self._parameters = 1 + max((p.index for u in units for g in u.groups for p in g.parameters), default=-1)
        # `_reduces`: whether the current backward pass reduces gradients over the ranks. `_is_last`: whether it reduces
        # them and is also the last backward pass of its step.
        self._reduces = True
        self._is_last = True
        # Whether sums of gradients stay on the device between micro-batches; None if `_sums_stay` has not decided yet.
        self._do_sums_stay: bool | None = None
        # Whether the gradients of the last backward pass are not reduced yet, so that the step has to reduce them.
        self._owes_reduction = False

    def of_unit(self, unit: Unit) -> Sequence[GradientGroup]:
        """Return the gradients of the unit's trainable groups."""
        return self._of_unit[unit.index]

    def begin_backward(self, *, reduces: bool, is_last: bool) -> None:
        """Expect the gradients of a backward pass, which begins now.

        Args:
            reduces: whether the pass reduces gradients, the same on all ranks. If not, they stay whole on this rank's
                device until a pass that reduces, or until `finish_reductions`.
            is_last: whether the pass reduces gradients and no pass of this step is expected after it. If so, each
                gradient goes to its home as soon as it is reduced.
        """
        self._reduces = reduces
        self._is_last = is_last
        for group in self._groups:
            group.expect_all()

    def has_gradients(self, unit: Unit) -> bool:
        """Return whether any parameter of the unit is trained now."""
        return not all(group.is_frozen for group in self._of_unit[unit.index])

    def start_backward(self, unit: Unit, step: int) -> None:
        """Ask for the memory that the unit's gradients will need, because its backward begins."""
        for group in self._of_unit[unit.index]:
            if not group.is_frozen:
                group.start(step, sends=self._is_last or self._do_sums_stay is False)
                if not unit.is_root:
                    # The gradient of the root unit is needed only at the end of the pass, so only gradients of other
                    # units are fetched to the device at the beginning of their backward.
                    group.memory.fetch_ahead()

    def has_all_of_pass(self, unit: Unit) -> bool:
        """Return whether every parameter of the unit that is trained now has its gradient of this pass."""
        return all(group.has_all_of_pass for group in self._of_unit[unit.index])

    def reduce(self, group: GradientGroup, step: int, next_use: int | None) -> bool:
        """Reduce a group's gradient, because the backward of its unit is over on every rank. All ranks must call this.

        Args:
            next_use: the position at which the group's parameters are needed next, which the store gets with an
                update; None if the position is not known.

        Returns:
            Whether the gradient is expected to be final: every parameter that is trained now has one in this step.
        """
        group.expect_all()
        if not self._reduces or group.is_frozen:
            return False
        group.reduce(step)
        group.next_use = next_use or 0
        return group.has_all_of_step

    def hand_over(self, gradient: GradientGroup, act: Act) -> None:
        """Begin to bring a reduced gradient to its home, if this pass is expected to be the last one of the step.

        A gradient that has not changed since the last call is at its home already, or on its way. For example, no
        gradient changes in a pass that computes the gradients of inputs only.

        Args:
            act: see GradientGroup.hand_over.
        """
        if gradient.is_handed_over:
            return
        if self._is_last:
            gradient.hand_over(act)
        elif self._sums_stay():
            gradient.park()
        else:
            gradient.hand_over(nothing)

    def _sums_stay(self) -> bool:
        """Return whether sums of gradients stay on the device between micro-batches. The first call decides for all.

        The first call comes when a backward pass has begun, so that most activations of a step are on the device. If
        there is too little room beside them, each sum leaves the device after a micro-batch, and comes back in the next
        one.
        """
        if self._do_sums_stay is None:
            device = self._collectives.device
            needed = sum(group.memory.staged_bytes for group in self._groups)
            memory = memory_bytes(device) if needed else None
            self._do_sums_stay = memory is None or needed <= memory[0] * _SHARE_FOR_SUMS
        return self._do_sums_stay

    def finish_backward(self, step: int) -> None:
        """Reduce the groups that backward has not reduced yet. All ranks must call this.

        These are groups whose gradients came, on some rank, after the backward of their unit, or in a backward that the
        hooks did not see.
        """
        if self._reduces:
            self._reduce_rest(step, "the end of a backward pass")
        self._owes_reduction = not self._reduces
        if self._is_last:
            self._hand_over_rest()

    def finish_reductions(self, step: int) -> None:
        """Reduce the gradients that are not reduced yet, because the step ends. All ranks must call this."""
        if self._owes_reduction:
            self._reduce_rest(step, "the end of a step")
            self._owes_reduction = False
        self._hand_over_rest()

    def _hand_over_rest(self) -> None:
        """Begin to bring the gradients to their homes that were not complete before the end of a pass."""
        for group in self._groups:
            if group.has_sum and not group.is_handed_over:
                group.hand_over(nothing)

    def _reduce_rest(self, step: int, what: str) -> None:
        """Reduce each group that waits for a reduction on any rank. All ranks must call this. Errors name it `what`."""
        waiting = self._collectives.any_rank([group.has_unreduced for group in self._groups], what)
        for group, is_waiting in zip(self._groups, waiting, strict=True):
            if is_waiting:
                group.reduce(step)

    def partition_of(self, group: FlatGroup, slot: int) -> torch.Tensor | None:
        """Return this rank's part [partition_numel] of a group's gradient so far.

        Return None if the parameter in `slot` has no gradient in this step.

        The values are those of backward, scaled by the loss scale, and the tensor is no copy, but the gradient's memory
        itself. With several ranks, a gradient that no rank has is either zeros or None.

        Raises:
            RuntimeError: the gradient is not reduced over the ranks yet.
            PhaseError: the store may have freed the gradient.
        """
        self._check_reduced()
        self._early_updates.require_kept("a gradient was asked for")
        found = self._find(group)
        alone = self._collectives.world_size == 1
        exists = found is not None and found.memory.is_requested and (not alone or slot in found.present)
        return found.partition if found is not None and exists else None

    def reduced_of(self, group: FlatGroup) -> torch.Tensor | None:
        """Return this rank's part [partition_numel] of a group's gradient, of the backward passes that are reduced.

        Return None, on all ranks alike, if none is reduced. It can raise PhaseError, as `partition_of` does.
        """
        self._early_updates.require_kept("a gradient was asked for")
        found = self._find(group)
        return found.partition if found is not None and found.is_reduced else None

    def read_unreduced(self, group: FlatGroup, slot: int) -> torch.Tensor | None:
        """Return the mean over ranks of a gradient that is not reduced yet; None if all are reduced.

        All ranks must call this.

        The values are those of backward, scaled by the loss scale: [numel] on the CPU, in fp32.
        """
        found = self._find(group)
        owed = self._owes_reduction and self._collectives.world_size > 1
        return found.read_unreduced(slot) if found is not None and owed else None

    def can_change(self, group: FlatGroup) -> bool:
        """Return, on all ranks alike, whether there is a gradient of the group in this step, which `change` returns.

        Raises:
            RuntimeError: the gradients are not reduced over the ranks yet.
            PhaseError: the store may have freed the gradient.
        """
        self._check_reduced()
        self._early_updates.require_kept("a gradient was set")
        found = self._find(group)
        return found is not None and found.memory.is_requested

    def change(self, group: FlatGroup, slot: int) -> torch.Tensor:
        """Return this rank's part [partition_numel] of a group's gradient, for a caller that changes its values.

        All ranks must call this, for a group of which `can_change` is true. The caller may write to the gradient of the
        parameter in `slot` only. That parameter has a gradient in this step from now on, and the group's early update
        is withdrawn.
        """
        found = self._find(group)
        assert found is not None, "can_change was asked"
        return found.set_in(slot)

    def _check_reduced(self) -> None:
        if self._owes_reduction and self._collectives.world_size > 1:
            raise RuntimeError("gradients are reduced over the ranks in the last backward() of a step: look after that")

    def is_present(self, group: FlatGroup, slot: int) -> bool:
        """Return whether a gradient of the parameter in `slot` has come on this rank in this step."""
        found = self._find(group)
        return found is not None and slot in found.present

    def _find(self, group: FlatGroup) -> GradientGroup | None:
        return next((found for found in self._groups if found.flat_group is group), None)

    def on_device(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of all gradients on the device, each with a storage of its own."""
        for group in self._groups:
            yield from group.on_device()

    def is_in_store(self, group: FlatGroup) -> bool:
        """Return whether the group has a gradient in this step, and the store's memory has it."""
        found = self._find(group)
        return found is not None and found.memory.is_requested and found.memory.on_device is None

    def make_norms_exact(self) -> None:
        """Compute norms with torch's bits from now on, because updates depend on them."""
        if self._norms.make_exact():
            for group in self._groups:
                group.forget_norms()

    def norm(self) -> GradientNorm:
        """Return the global norm. All ranks must call this.

        With exact norms it equals that of `torch.nn.utils.clip_grad_norm_` bit for bit at world size 1; see
        tests/integration/test_parity.py.
        """
        norms = torch.zeros(self._parameters, dtype=torch.float32)
        present = torch.zeros(self._parameters, dtype=torch.float32)
        for group in self._groups:
            if not group.memory.is_requested:
                continue
            indices, values = group.norms()
            group.park()
            # The tiles of a parameter are groups of their own, and each tile has a part of the parameter's norm. So the
            # norm of the parameter is the root of the sum of their squares, which `hypot` adds up.
            norms[indices] = torch.hypot(norms[indices], values) if group.is_tile else values
            for slot in group.present:
                present[group.flat_group.parameters[slot].index] = 1.0
        rows = self._collectives.gather_rows(torch.cat((norms, present)), "the gradient norm")
        anywhere = rows[:, self._parameters :].amax(dim=0) > 0
        # Parameters without a gradient are left out of the total norm: zeros for them would not change the sum, but the
        # order in which torch adds up the other norms, and so the rounding of the result.
        total = torch.linalg.vector_norm(rows[:, : self._parameters][:, anywhere])
        return GradientNorm(total=total, present=anywhere.tolist())

    def groups_to_update(self, updated: Sequence[bool]) -> Iterator[GradientGroup]:
        """Yield the groups with a parameter that is `updated` in this step, in forward order.

        The caller must finish the groups that it gets; this method finishes the other groups.
        """
        for group in self._groups:
            if any(updated[parameter.index] for parameter in group.flat_group.parameters):
                yield group
            else:
                group.withdraw()
                group.finish()

    def free(self) -> None:
        """Withdraw all early updates of a step that is not made, then free the memory of its gradients."""
        for group in self._groups:
            group.withdraw()
        for group in self._groups:
            group.finish()

    def abandon(self) -> None:
        """Undo all early updates and free all memory, after a failure. It raises no StoreError."""
        for group in self._groups:
            group.abandon()
