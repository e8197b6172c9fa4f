"""The gradient of one flat group on its way: from its parameters, over the ranks, to this rank's part of the mean.

This module owns the memory of that part (leased from the store, or allocated on the device) from the first micro-batch
of a step to its update, the whole gradients of backward passes that do not reduce, and which parameter has a gradient.
It must never decide when a group is reduced or handed over, because gradients.py does, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from trainer_client.base.lanes.lanes import Act, Lanes, PendingCopy
from trainer_client.client.transport.parking import Parking
from trainer_client.client.transport.planes import LeasedBytes
from trainer_client.errors import StoreError, TrainerClientError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.step.early_updates import EarlyUpdates
from trainer_client.training.step.gradient_memory import GradientMemory, nothing
from trainer_client.training.step.gradient_state import GradientState, GradientVerb, following
from trainer_client.training.step.norms import Norms


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
            self.hand_over(nothing)
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


def _put(target: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
    """Copy `values` into `target`, or add them to it."""
    if add:
        target.add_(values.to(target.device))
    else:
        target.copy_(values)
