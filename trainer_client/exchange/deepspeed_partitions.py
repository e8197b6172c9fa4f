"""The elements of one parameter, read from the partitions of DeepSpeed's ranks.

[Note: DeepSpeed's layouts] in deepspeed_zero.py says how DeepSpeed lays the partitions out.

This module must never copy more elements than the caller asks for.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Joined:
    """The elements of one parameter in a flattened group, which consists of the partitions in order (stages 1 and 2).

    `begins` has, for each partition, the index of its first element in the flattened group. `first` is the index of the
    parameter's first element in the flattened group.
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
    """The elements of one parameter that is cut into equal parts, one for each rank (stage 3).

    The part of a rank begins at element `first` of the rank's tensor.
    """

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
