"""Reads of small parameters outside of the model's forward, as DeepSpeed's stage 3 allows them.

DeepSpeed keeps parameters of up to `stage3_param_persistence_threshold` elements whole, and at most
`stage3_model_persistence_threshold` elements of them, so that scripts read them as `model.scale.item()`. Here, when a
function of torch is given such a parameter, the partitions that have it are read for this one call. Nothing stays
gathered, so steps cost no more than without such reads, and a read sees the values of the last step.

This module owns which parameters may be read so, and what a read may return. It must never let a change be lost: a
function that would change the copy that was read, or return memory of it, is refused as for a large parameter. It must
never wait for a call of another rank, because scripts read on rank 0 alone, as for a line of the log.

[Note: the step that is read] A rank may read the partition of another rank before that rank has handed its gradient
over. With one-sided gathers the ranks meet at the end of each step, so this cannot happen. With other gathers a read
waits for the commit of the last step, for which all ranks have voted in their own `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from paramserver.contract.kinds import PARAM
from trainer_client.client.transport.slab_leases import SlabLeases
from trainer_client.errors import ReleasedParameterError
from trainer_client.training.model.flat_group import FlatGroup
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.transforms import outside_of_transforms

# The types that a function of torch may return for a read of a small parameter, besides new tensors. Arrays of numpy
# are not allowed, because they would share the memory of the temporary copy that the function has read.
_VALUES = (bool, int, float, complex, str, type(None))


class SmallReads:
    """The reads of small parameters outside of forwards, for one engine. The hooks ask it before each read.

    Args:
        parameters: all parameters, in the model's order; none if the ranks of the job use several stores, because
            then nothing may be read.
        largest: a parameter with more elements may not be read.
        total: the most elements of all parameters that may be read, counted in the order of `parameters`.
        leases: this rank's leases on slabs.
        world_size: the number of ranks.
        wait_for_step: waits until the store has the last step of all ranks, and returns whether it has it.
    """

    def __init__(
        self,
        parameters: Sequence[ModelParameter],
        *,
        largest: int,
        total: int,
        leases: SlabLeases,
        world_size: int,
        wait_for_step: Callable[[], bool],
    ) -> None:
        self._leases = leases
        self._world_size = world_size
        self._wait_for_step = wait_for_step
        self._small: set[int] = set()
        for parameter in parameters:
            numel = parameter.shape.numel()
            if numel <= largest and numel <= total:
                total -= numel
                self._small.add(id(parameter.tensor))

    def allows(self, parameter: ModelParameter, function: str) -> bool:
        """Return whether `function` of torch may read the parameter's values outside of a forward."""
        # A change through `parameter.data` does not increase the version counter of the tensor. So the engine would not
        # notice the change, and it would be lost.
        return id(parameter.tensor) in self._small and function != "data"

    def end(self) -> None:
        """Refuse all reads from now on, because the engine ends."""
        self._small.clear()

    @contextmanager
    def reading(self, group: FlatGroup, parameter: ModelParameter, function: str) -> Iterator[Callable[[Any], None]]:
        """Give the parameter of a group its values within the context, and yield the check of the function's result.

        The check raises ReleasedParameterError if the function has changed the parameter, or if its result has the
        parameter's memory or needs it for a backward pass.

        Raises:
            ReleasedParameterError: the store does not have the values of the last step.
            StoreError: the store failed, or the commit of the last step has failed.
        """
        with outside_of_transforms(), torch.no_grad():
            values = self._read(group, parameter, function)
        tensor = parameter.tensor
        with group.showing(parameter, values):
            version, address = tensor._version, values.untyped_storage().data_ptr()

            def check(result: Any) -> None:
                if tensor._version != version or not all(_is_new(leaf, address) for leaf in tree_leaves(result)):
                    raise ReleasedParameterError(parameter.fqn, function)

            yield check

    def _read(self, group: FlatGroup, parameter: ModelParameter, function: str) -> torch.Tensor:
        """Return a copy of a parameter's values, in its shape and dtype on the group's device."""
        slot = group.slot_table.slots[group.parameters.index(parameter)]
        values = torch.empty(slot.numel, dtype=group.dtype, device=group.device)
        for rank in range(self._world_size):
            first, last = group.slot_table.partition_range(rank)
            begin, end = max(first, slot.offset), min(last, slot.offset + slot.numel)
            if begin >= end:
                continue
            target = values[begin - slot.offset : end - slot.offset]
            if group.partition is not None and first == group.start:
                target.copy_(group.partition[begin - first : end - first])
                continue
            if not self._wait_for_step():
                raise ReleasedParameterError(parameter.fqn, function)
            (leased,) = leases = self._leases.acquire_read([group.slab(PARAM, rank)], position=0).wait()
            try:
                target.copy_(leased.data.view(group.dtype)[begin - first : end - first])
            finally:
                self._leases.release(leases)
        return values.view(parameter.shape)


def _is_new(leaf: Any, address: int) -> bool:
    """Return whether a part of a function's result is no tensor, or a tensor that does not use memory at `address`."""
    if isinstance(leaf, torch.Tensor):
        return not leaf.requires_grad and leaf.untyped_storage().data_ptr() != address
    return isinstance(leaf, _VALUES)
