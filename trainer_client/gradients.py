"""Gradients on their way to the store: from the parameters, over the ranks, into leased memory of the host tier.

Owns the leases of kind GRAD from the first micro-batch of a step to the hand-over, and which parameter has a gradient.
Must never let the ranks disagree about a reduction: what is reduced, and when, follows from events that every rank sees
(a unit's backward is over) or from an agreement at the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.collectives import Collectives
from trainer_client.errors import TrainerClientError
from trainer_client.flat_group import FlatGroup
from trainer_client.link.channel import Pending
from trainer_client.link.planes import LeasedBytes
from trainer_client.link.rank_store import RankStore
from trainer_client.units import Unit


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
    """The gradients of one trainable flat group."""

    def __init__(self, group: FlatGroup, store: RankStore, collectives: Collectives) -> None:
        self.flat_group = group
        self.missing = set(range(len(group.parameters)))  # without a gradient since the last reduction
        self.present: set[int] = set()  # with a gradient in this step
        self._store = store
        self._collectives = collectives
        self._pending: Pending[list[LeasedBytes]] | None = None
        self._leased: LeasedBytes | None = None
        self._full: torch.Tensor | None = None  # this rank's unreduced gradient, world size > 1
        self._reduced = False  # whether the lease holds a sum of this step already, world size > 1

    @property
    def is_dirty(self) -> bool:
        """Whether gradients wait for a reduction."""
        return len(self.missing) < len(self.flat_group.parameters)

    @property
    def is_complete(self) -> bool:
        """Whether no gradient is missing; that of a parameter which is frozen for a while is not."""
        return not any(self.flat_group.parameters[slot].tensor.requires_grad for slot in self.missing)

    @property
    def is_frozen(self) -> bool:
        """Whether all parameters are frozen for a while: no gradient will come."""
        return not any(parameter.tensor.requires_grad for parameter in self.flat_group.parameters)

    @property
    def leased(self) -> LeasedBytes | None:
        """The lease of this step, waited for; None if nobody asked for one."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            (self._leased,) = pending.wait()
        return self._leased

    @property
    def chunk(self) -> torch.Tensor:
        """This rank's part of the gradient, in leased memory: [layout.chunk] of the compute dtype, on the CPU."""
        leased = self.leased
        assert leased is not None, "start_lease comes first"
        return leased.data.view(self.flat_group.dtype)

    def start_lease(self, step: int) -> None:
        """Asks for the memory of this step's gradient. Does not wait; idempotent within the step."""
        if self._leased is None and self._pending is None:
            self._pending = self._store.acquire_write([self.flat_group.slab(pb.KIND_GRAD)], step)

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
        place = self.flat_group.layout.slots[slot]
        first, last = place.position, place.position + place.numel
        if self._collectives.world_size == 1:
            _put(self.chunk[first:last].view(parameter.shape), gradient, add=slot in self.present)
        else:
            if self._full is None:
                self._full = self._zeros()
            _put(self._full[first:last].view(parameter.shape), gradient, add=slot not in self.missing)
        self.missing.discard(slot)
        self.present.add(slot)

    @torch.no_grad()
    def reduce(self) -> None:
        """Adds the mean over ranks to this rank's part; a missing gradient counts as zeros. A collective."""
        self.missing = set(range(len(self.flat_group.parameters)))
        if self._collectives.world_size == 1:
            return
        device = self._collectives.device
        layout, dtype = self.flat_group.layout, self.flat_group.dtype
        full, self._full = self._full, None
        direct = not self._reduced and self.chunk.device == device
        mean = self.chunk if direct else torch.empty(layout.chunk, dtype=dtype, device=device)
        self._collectives.reduce_scatter_mean(mean, self._zeros() if full is None else full)
        if not direct:
            _put(self.chunk, mean, add=self._reduced)
        self._reduced = True

    def _zeros(self) -> torch.Tensor:
        layout = self.flat_group.layout
        return torch.zeros(layout.numel, dtype=self.flat_group.dtype, device=self._collectives.device)

    def norms(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(index of the parameter, 2-norm in fp32) of each shard in this rank's part."""
        for shard in self.flat_group.shards:
            values = self.chunk[shard.position : shard.position + shard.numel]
            yield (
                self.flat_group.parameters[shard.slot].index,
                torch.linalg.vector_norm(values, dtype=torch.float32),
            )

    def finish(self) -> LeasedBytes | None:
        """The step is over: the lease, to be handed over or returned, and nothing of the step stays here."""
        leased, self._leased = self.leased, None
        self.present.clear()
        self._reduced = False
        return leased


class Gradients:
    """All gradients of the model."""

    def __init__(self, units: Sequence[Unit], store: RankStore, collectives: Collectives) -> None:
        self._store = store
        self._collectives = collectives
        self._of_unit = {
            unit.index: [GradientGroup(g, store, collectives) for g in unit.groups if g.trainable] for unit in units
        }
        self._groups = [group for groups in self._of_unit.values() for group in groups]
        self._parameters = 1 + max((p.index for u in units for g in u.groups for p in g.parameters), default=-1)

    def install(self, step_of_backward: Callable[[], int]) -> None:
        """Takes gradients over as autograd finishes them, for the step that `step_of_backward` names or refuses."""

        def hook(group: GradientGroup, slot: int, _: torch.Tensor) -> None:
            group.start_lease(step_of_backward())
            group.take(slot)

        for group in self._groups:
            for slot, parameter in enumerate(group.flat_group.parameters):
                frozen = not parameter.tensor.requires_grad
                # torch takes a hook of a trainable parameter only, and keeps it while the parameter is frozen.
                parameter.tensor.requires_grad_(True)
                parameter.tensor.register_post_accumulate_grad_hook(partial(hook, group, slot))
                parameter.tensor.requires_grad_(not frozen)

    def start_backward(self, unit: Unit, step: int) -> None:
        """The unit's backward begins: its gradients will need memory."""
        for group in self._of_unit[unit.index]:
            if not group.is_frozen:
                group.start_lease(step)

    def unit_is_complete(self, unit: Unit) -> bool:
        """Whether every trainable parameter of the unit has its gradient."""
        return all(group.is_complete for group in self._of_unit[unit.index])

    def reduce_unit(self, unit: Unit, step: int) -> None:
        """The unit's backward is over, on every rank. A collective."""
        for group in self._of_unit[unit.index]:
            if not group.is_frozen:
                group.start_lease(step)
                group.reduce()

    def finish_backward(self, step: int) -> None:
        """Reduces what came late or outside of a tracked backward, on any rank. A collective."""
        dirty = self._collectives.any_rank([group.is_dirty for group in self._groups])
        for group, is_dirty in zip(self._groups, dirty, strict=True):
            if is_dirty:
                group.start_lease(step)
                group.reduce()

    def norm(self) -> GradientNorm:
        """The global norm, bit for bit that of `torch.nn.utils.clip_grad_norm_` at world size 1. A collective."""
        norms = torch.zeros(self._parameters, dtype=torch.float32)
        present = torch.zeros(self._parameters, dtype=torch.float32)
        for group in self._groups:
            if group.leased is None:
                continue
            for index, norm in group.norms():
                norms[index] = norm
            for slot in group.present:
                present[group.flat_group.parameters[slot].index] = 1.0
        rows = self._collectives.gather_rows(torch.cat((norms, present))).cpu()
        anywhere = rows[:, self._parameters :].amax(dim=0) > 0
        # A zero for a parameter without gradient would not change the sum, but the order in which it is rounded.
        total = torch.linalg.vector_norm(rows[:, : self._parameters][:, anywhere])
        return GradientNorm(total=total, present=anywhere.tolist())

    def hand_over(self) -> Iterator[tuple[FlatGroup, LeasedBytes]]:
        """The groups that have gradients in this step, in forward order, with their leases."""
        for group in self._groups:
            if leased := group.finish():
                yield group.flat_group, leased

    def discard(self) -> None:
        """Returns the leases of a step that is not made."""
        if leases := [leased for _, leased in self.hand_over()]:
            # Waited for: the next step leases the same memory anew.
            self._store.release(leases).wait()


def _put(target: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
    if add:
        target.add_(values.to(target.device))
    else:
        target.copy_(values)
