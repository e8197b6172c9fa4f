"""Gradients on their way to the optimizer: from the parameters, over the ranks, to this rank's part of the mean.

This module owns the memory of that part (leased from the store, or allocated on the device) from the first micro-batch
of a step to its update, the whole gradients of backward passes that do not reduce, and which parameter has a gradient.
It must never let the ranks disagree about a reduction: which groups are reduced, and when, follows from events that
every rank sees (a unit's backward is over) or from an agreement at the end of the backward pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from trainer_client.base.device import memory_bytes
from trainer_client.base.lanes.lanes import Act, Lanes, PendingCopy
from trainer_client.client.transport.parking import Parking
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import StoreError, TrainerClientError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.states import PlacedStates
from trainer_client.training.model.units import Unit
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step.early_updates import EarlyUpdates
from trainer_client.training.step.gradient_memory import GradientMemory, LeasedMemory, LocalMemory, StagedMemory
from trainer_client.training.step.gradient_state import GradientState, GradientVerb, following
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


class GradientGroup:
    """The gradients of one trainable flat group, from the hooks on its parameters to this rank's part of their mean.

    Attributes:
        missing: slots of the parameters that have got no gradient since this backward pass began, or since the unit was
            last reduced in it.
        present: slots of the parameters that have a gradient in this step.
        next_use: the position at which the group's parameters are needed next; 0: the position is not known.
    """

    def __init__(
        self,
        group: FlatGroup,
        memory: GradientMemory,
        early_updates: EarlyUpdates,
        parking: Parking,
        collectives: Collectives,
        lanes: Lanes,
        norms: Norms,
        *,
        mean: bool,
    ) -> None:
        self.flat_group = group
        self.memory = memory
        self._parking = parking
        self.missing = set(range(len(group.parameters)))
        self.present: set[int] = set()
        self.next_use = 0
        self._early_updates = early_updates
        self._norm = norms
        # The norms of the shards in `partition`; None if they were not computed since the last change of `partition`.
        self._norms: torch.Tensor | None = None
        # On an accelerator: `_norms_on_host` is host memory for the norms of the shards. `_sent` is the copy of the
        # complete gradient and its norms from the device; None if it was not begun since the last change of
        # `partition`.
        on_host = collectives.device.type == "cpu"
        self._norms_on_host = None if on_host else lanes.host_buffer(len(group.shards), torch.float32)
        self._sent: PendingCopy | None = None
        self._state = GradientState.EMPTY
        # The number of the last call of `hand_over`. The function that a call has left to run later sees by it, and by
        # the state, whether its call is obsolete, and then does nothing.
        self._hand_overs = 0
        self._reduction_dtype = group.reduction_dtype
        self._collectives = collectives
        self._lanes = lanes
        self._mean = mean
        # Two attributes that are used only with several ranks. `_full`: the gradient that this rank has not reduced
        # yet. `_unreduced`: the slots of the parameters that have a gradient in `_full`.
        self._full: torch.Tensor | None = None
        self._unreduced: set[int] = set()

    @property
    def is_tile(self) -> bool:
        """Whether the group is a tile, and so has a part of its parameter's gradient."""
        return any(parameter.tile_of is not None for parameter in self.flat_group.parameters)

    @property
    def has_unreduced(self) -> bool:
        """Whether this rank has gradients of the group that are not yet added up over the ranks."""
        return self._state.has_whole

    @property
    def has_all_of_pass(self) -> bool:
        """Whether every parameter that is trained now has its gradient of this pass. A frozen parameter needs none."""
        return not any(self.flat_group.parameters[slot].tensor.requires_grad for slot in self.missing)

    @property
    def has_all_of_step(self) -> bool:
        """Whether every parameter that is trained now has a gradient in this step, of any pass."""
        parameters = self.flat_group.parameters
        return all(slot in self.present or not p.tensor.requires_grad for slot, p in enumerate(parameters))

    @property
    def is_settled(self) -> bool:
        """Whether this rank does not wait for a lease on memory for the gradient."""
        return self.memory.is_settled

    @property
    def is_frozen(self) -> bool:
        """Whether the script has frozen all parameters of the group for now, so that none gets a gradient."""
        return not any(parameter.tensor.requires_grad for parameter in self.flat_group.parameters)

    @property
    def partition(self) -> torch.Tensor:
        """This rank's part [partition_numel] of the gradient, in the group's gradient dtype, where `memory` has it."""
        self._lanes.rejoin()
        return self._use()

    def _use(self) -> torch.Tensor:
        """Return the partition in memory that this rank can read and write, after it was brought back if necessary."""
        self._parking.use(self)
        return self.memory.partition

    def start(self, step: int, *, sends: bool = True) -> None:
        """Ask for the memory of this rank's part of the gradient; see GradientMemory.start."""
        self._parking.use(self)
        self.memory.start(step, sends=sends)

    def park(self) -> None:
        """Let the store spill the gradient, if the store asks for that, because nothing uses the gradient for a while.

        The norms of a complete gradient are computed before it is parked, because they need its bytes.
        """
        self._parking.remove(self)
        if not self.memory.can_park:
            return
        if self.is_handed_over:
            self.norms()
            self._parking.remove(self)
        name = self.flat_group.name
        parked = self.memory.park(sent=self._early_updates.gradient_of(name))
        if parked is not None:
            self._early_updates.note_parked(name, parked)

    def expect_all(self) -> None:
        """Expect a gradient of every parameter of the group, because a backward pass begins."""
        self.missing = set(range(len(self.flat_group.parameters)))

    def expect_only(self, is_computed: Callable[[torch.Tensor], bool]) -> None:
        """Do not wait for gradients that the backward pass under way does not compute."""
        parameters = self.flat_group.parameters
        self.missing = {
            slot for slot in self.missing if (p := parameters[slot].tensor).requires_grad and is_computed(p)
        }

    @property
    def is_handed_over(self) -> bool:
        """Whether `hand_over` was called for the gradient, and the gradient has not changed after that."""
        return self._state is GradientState.SENT

    def begin_change(self) -> None:
        """Withdraw the early update and remove the norms, because the gradient is about to change."""
        self._early_updates.require_revisable(
            f"a gradient of {self.flat_group.unit} came after its last one was expected in this step (after several "
            "backward passes, set gradient_accumulation_steps to their number)",
            self.flat_group.name,
        )
        self.withdraw()
        self._norms = self._sent = None
        self.memory.reopen()

    def withdraw(self) -> None:
        """Have the store undo the group's early update, and begin none when the gradient arrives at its home."""
        self._enter(GradientVerb.WITHDRAW)
        self._early_updates.withdraw(self.flat_group.name)

    def hand_over(self, act: Act) -> None:
        """Begin to bring the complete gradient to its home, and its norms to the host.

        Args:
            act: called when the gradient and its norms have arrived: at once, or in a later call of the lanes. It is
                not called if the gradient has changed or was withdrawn before they arrive.
        """
        self._enter(GradientVerb.SEND)
        self._hand_overs += 1
        mine = self._hand_overs

        def act_unless_withdrawn() -> None:
            if self.is_handed_over and self._hand_overs == mine:
                act()
                self.park()

        self._parking.use(self)
        if self._collectives.world_size == 1:
            self._sent = self.memory.send(self._measured(), act_unless_withdrawn)
        else:
            with self._lanes.communicating():
                self._sent = self.memory.send(self._measured(), act_unless_withdrawn)

    def _measured(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (target, source) pairs to copy the norms from the device to the host; none on the CPU."""
        if self._norms_on_host is None or not self.flat_group.shards:
            return []
        return [(self._norms_on_host, self._norms_of_shards())]

    def _wait_for_norms(self) -> torch.Tensor:
        if self._norms_on_host is None:
            return self._norms_of_shards()
        if self._sent is None:
            self.hand_over(_nothing)
        assert self._sent is not None, "handed over just now"
        self._sent.wait()
        return self._norms_on_host.clone()

    def _norms_of_shards(self) -> torch.Tensor:
        partition = self._use()
        return torch.stack([self._norm.of(partition[shard.in_partition]) for shard in self.flat_group.shards])

    def forget_norms(self) -> None:
        """Drop the norms of the shards, so that `norms` computes them anew."""
        self._norms = None

    @torch.no_grad()
    def accumulate(self, slot: int, step: int, factor: float) -> None:
        """Add the `.grad` of the parameter in `slot`, times `factor`, to the gradient of `step`, and set it to None."""
        self.start(step, sends=False)
        parameter = self.flat_group.parameters[slot]
        gradient = parameter.tensor.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise TrainerClientError(
                f"parameter {parameter.fqn} has a {gradient.layout} gradient: make it dense (Embedding(sparse=False))"
            )
        parameter.tensor.grad = None
        if factor != 1.0:
            gradient = gradient * factor
        self.begin_change()
        place = self.flat_group.slot_table.slots[slot]
        first, last = place.offset, place.offset + place.numel
        if self._collectives.world_size == 1:
            partition = self._use()
            _put(partition[first:last].view(parameter.shape), gradient, add=slot in self.present)
            self._enter(GradientVerb.ADD_UP)
        else:
            if self._full is None:
                self._full = self._zeros()
            _put(self._full[first:last].view(parameter.shape), gradient, add=slot in self._unreduced)
            self._unreduced.add(slot)
            self._enter(GradientVerb.KEEP_WHOLE)
        self.missing.discard(slot)
        self.present.add(slot)

    @torch.no_grad()
    def reduce(self, step: int) -> None:
        """Add the ranks' mean (or sum) of the unreduced gradients to this rank's part. All ranks must call this.

        If a parameter has no gradient on a rank, zeros are taken for it.
        """
        self.start(step, sends=False)
        if self._collectives.world_size == 1:
            return
        self.begin_change()
        device, dtype = self._collectives.device, self._reduction_dtype
        full = self._zeros() if self._full is None else self._full
        self._full = None
        self._unreduced.clear()
        partition = self._use()
        has_sum = self._state.has_sum
        direct = not has_sum and partition.device == device and partition.dtype == dtype
        reduced = partition if direct else torch.empty(partition.numel(), dtype=dtype, device=device)
        what = f"the reduction of {self.flat_group.unit}"
        with self._lanes.communicating(full, reduced, partition):
            self._collectives.reduce_scatter(reduced, full.to(dtype), what, mean=self._mean)
            if not direct:
                _put(partition, reduced, add=has_sum)
        self._enter(GradientVerb.ADD_UP)

    def set_in(self, slot: int) -> torch.Tensor:
        """Return `partition` for a caller that sets the gradient of the parameter in `slot`, which counts as present.

        The early update is withdrawn before.
        """
        self.begin_change()
        self.present.add(slot)
        if self._collectives.world_size == 1:
            self._enter(GradientVerb.ADD_UP)
        return self.partition

    @property
    def is_reduced(self) -> bool:
        """Whether `partition` has a sum over all ranks of gradients of this step. All ranks have the same answer."""
        return self._state.has_sum or (self._collectives.world_size == 1 and self.memory.is_requested)

    @property
    def has_sum(self) -> bool:
        """Whether `partition` has a sum of gradients of this step. If not, its memory is uninitialised."""
        return self._state.has_sum

    @torch.no_grad()
    def read_unreduced(self, slot: int) -> torch.Tensor:
        """Return the mean, or sum, over ranks of a gradient that is not reduced yet, [numel] on the CPU, in fp32.

        The mean is computed as `reduce` computes it. The gradient itself stays as it is. All ranks must call this.
        """
        world_size, device, dtype = self._collectives.world_size, self._collectives.device, self._reduction_dtype
        place = self.flat_group.slot_table.slots[slot]
        padded = torch.zeros(-(-place.numel // world_size) * world_size, dtype=dtype, device=device)
        if self._full is not None and slot in self._unreduced:
            padded[: place.numel] = self._full[place.offset : place.offset + place.numel]
        reduced = torch.empty(padded.numel() // world_size, dtype=dtype, device=device)
        what = f"the reading of a gradient of {self.flat_group.unit}"
        self._collectives.reduce_scatter(reduced, padded, what, mean=self._mean)
        self._collectives.all_gather_flat(padded, reduced, what)
        return padded[: place.numel].float().cpu()

    def _zeros(self) -> torch.Tensor:
        group = self.flat_group
        return torch.zeros(group.slot_table.numel, dtype=group.gradient_dtype, device=self._collectives.device)

    def on_device(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of this gradient on the device, each with a storage of its own."""
        self._lanes.rejoin()
        yield from (tensor for tensor in (self.memory.on_device, self._full) if tensor is not None)

    def norms(self) -> tuple[list[int], torch.Tensor]:
        """Return the norms of this rank's shards.

        Returns:
            The indices [n] of the parameters of which this rank has a shard, and the 2-norm [n] of each shard in fp32.
        """
        shards = self.flat_group.shards
        if self._norms is None:
            self._norms = self._wait_for_norms() if shards else torch.empty(0, dtype=torch.float32)
        return [self.flat_group.parameters[shard.slot].index for shard in shards], self._norms

    def is_finite(self) -> bool:
        """Return whether the norms of all parameters with a gradient are finite on this rank."""
        _, norms = self.norms()
        present = [shard.slot in self.present for shard in self.flat_group.shards]
        return bool(norms[torch.tensor(present, dtype=torch.bool)].isfinite().all())

    def take_lease(self, step: int) -> LeasedBytes:
        """Return the gradient in leased memory for the update of `step`, and drop all other state of the gradient."""
        leased = self.memory.lease(step)
        self.finish()
        return leased

    def abandon(self) -> None:
        """Undo the early update of this gradient, and free the gradient's memory.

        The caller reports the failure that made this necessary. An error of the store is ignored here, because a store
        that refuses to undo the update has lost this session or the step, and with it the update.
        """
        with suppress(StoreError):
            self.withdraw()
        self.memory.abandon()
        self.finish()

    def finish(self) -> None:
        """Forget the step's gradient and free its memory, so that the next step begins without a gradient."""
        self.memory.free()
        self._parking.remove(self)
        self._early_updates.remove(self.flat_group.name)
        self._enter(GradientVerb.FINISH)
        self._norms = self._sent = None
        self.present.clear()
        self._full = None
        self._unreduced.clear()

    def _enter(self, verb: GradientVerb) -> None:
        self._state = following(self._state, verb)


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
            gradient.hand_over(_nothing)

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
                group.hand_over(_nothing)

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


def _put(target: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
    """Copy `values` into `target`, or add them to it."""
    if add:
        target.add_(values.to(target.device))
    else:
        target.copy_(values)


def _nothing() -> None:
    """Do nothing when a gradient has arrived at its home."""
