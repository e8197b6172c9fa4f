"""The packs that are filled in a step: small tensors wait here until their group is whole, or the step is committed.

Holds copies, never the user's tensors. Knows no connection.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from trainer_client.store_client.connection import Call
from trainer_client.store_client.job_layout import Pack

# Tensors that are copied between two looks at whether the call is still wanted.
_COPIED_AT_ONCE = 256


@dataclass(slots=True)
class Filling:
    """A pack with the values of this step, as far as they were put: `values` [pack.numel]."""

    pack: Pack
    values: torch.Tensor
    missing: set[str]

    def complete(self, stored: torch.Tensor, numels: Mapping[str, int]) -> None:
        """Take what is missing from the pack's last committed bytes, uint8."""
        before = stored.view(self.pack.dtype)
        for fqn in self.missing:
            start = self.pack.positions[fqn]
            end = start + numels[fqn]
            self.values[start:end] = before[start:end]
        self.missing.clear()


class Packing:
    """The fillings of one writer."""

    def __init__(self) -> None:
        self._fillings: dict[str, Filling] = {}

    def clear(self) -> None:
        """Forget what was put."""
        self._fillings.clear()

    def put(self, call: Call, tensors: Iterable[tuple[Pack, str, torch.Tensor]]) -> list[Filling]:
        """Copy values of tensors into their packs. Returns those that are whole now, which are the caller's to send.

        Raises what `Call.check` raises.
        """
        whole: list[Filling] = []
        ahead = iter(tensors)
        while chunk := list(itertools.islice(ahead, _COPIED_AT_ONCE)):
            with call.at_memory():
                for pack, fqn, tensor in chunk:
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
        """Return the packs of which only a part was put."""
        return iter(list(self._fillings.values()))

    def take(self, filling: Filling) -> Filling:
        """Take a filling out, for it to be sent."""
        return self._fillings.pop(filling.pack.name)
