"""Buffers for packs. A pack is a shard group of several small tensors, which the store receives and keeps as one slab.

The copy of a small tensor that the user has put is kept here until all tensors of its pack are put, or the step is
committed. This module holds copies, never the user's tensors. It knows no connection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from trainer_client.client.store_client.connection import Call
from trainer_client.client.store_client.job_layout import Pack

# The number of tensors that are copied into packs between two checks of whether the user has cancelled the call.
_COPIED_AT_ONCE = 256


@dataclass(slots=True)
class Filling:
    """A pack with the values that were put in this step.

    Attributes:
        pack: the pack's description: its tensors and their positions.
        values: the pack's elements, [pack.numel].
        missing: names of the tensors that were not put yet.
    """

    pack: Pack
    values: torch.Tensor
    missing: set[str]

    def complete(self, stored: torch.Tensor, numels: Mapping[str, int]) -> None:
        """Copy the missing tensors from `stored`, the pack's last committed bytes (uint8); `numels` is by name."""
        before = stored.view(self.pack.dtype)
        for fqn in self.missing:
            start = self.pack.positions[fqn]
            end = start + numels[fqn]
            self.values[start:end] = before[start:end]
        self.missing.clear()


class Packing:
    """The packs of one writer of which some tensors were put in this step, and others were not yet.

    The writer puts small tensors here, and sends a pack to the store once all its tensors are there.
    """

    def __init__(self) -> None:
        self._fillings: dict[str, Filling] = {}

    def clear(self) -> None:
        """Forget all values that were put, because the step is committed or abandoned."""
        self._fillings.clear()

    def put(self, call: Call, tensors: Iterable[tuple[Pack, str, torch.Tensor]]) -> list[Filling]:
        """Copy tensors into their packs, and return the packs that are complete now, which the caller has to send.

        Args:
            call: the user's call; once it is cancelled, no tensor is read any more.
            tensors: triples of a pack, the name of a tensor in it and the tensor.

        Raises:
            StoreTimeoutError, CallCancelledError: see `Call.check`.
        """
        whole: list[Filling] = []
        ahead = iter(tensors)
        while batch := list(itertools.islice(ahead, _COPIED_AT_ONCE)):
            with call.at_memory():
                for pack, fqn, tensor in batch:
                    filling = self._fillings.get(pack.name)
                    if filling is None:
                        values = torch.zeros(pack.numel, dtype=pack.dtype)
                        filling = self._fillings[pack.name] = Filling(pack, values, set(pack.positions))
                    start = pack.positions[fqn]
                    filling.values[start : start + tensor.numel()] = tensor.detach().reshape(-1)
                    filling.missing.discard(fqn)
                    if not filling.missing:
                        whole.append(self._fillings.pop(pack.name))
        return whole

    def incomplete(self) -> Iterator[Filling]:
        """Yield the packs of which some tensors were put in this step, and others were not."""
        return iter(list(self._fillings.values()))

    def take(self, filling: Filling) -> Filling:
        """Remove `filling` from these packs and return it, for the caller to send it."""
        return self._fillings.pop(filling.pack.name)
