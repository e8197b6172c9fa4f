"""The elements of one parameter in the partitions of the ranks of DeepSpeed.

[Note: DeepSpeed's layouts] in deepspeed_zero.py says how they lie.

This module must never copy more elements than the caller asks for.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Joined:
    """The elements of one parameter in partitions of a flattened group, which lie one after another.

    `begins` has the first element of each partition; `first` is the parameter's first element.
    """

    partitions: Sequence[torch.Tensor]
    begins: Sequence[int]
    first: int

    @property
    def dtype(self) -> torch.dtype:
        return self.partitions[0].dtype

    def read(self, target: torch.Tensor, offset: int) -> None:
        done = 0
        while done < target.numel():
            position = self.first + offset + done
            number = bisect.bisect_right(self.begins, position) - 1
            start = position - self.begins[number]
            count = min(target.numel() - done, self.partitions[number].numel() - start)
            target[done : done + count].copy_(self.partitions[number][start : start + count])
            done += count


@dataclass(frozen=True, slots=True)
class Striped:
    """The elements of one parameter that is cut into equal parts, one in each rank's tensor, from `first` on."""

    tensors: Sequence[torch.Tensor]
    first: int
    part_numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def read(self, target: torch.Tensor, offset: int) -> None:
        done = 0
        while done < target.numel():
            rank, start = divmod(offset + done, self.part_numel)
            count = min(target.numel() - done, self.part_numel - start)
            begin = self.first + start
            target[done : done + count].copy_(self.tensors[rank][begin : begin + count])
            done += count
