"""The collectives of one ZeRO-3 step, on torch.distributed.

Owns nothing. At world size 1 nothing is communicated and no process group is needed. Every rank must make the same
calls in the same order: callers decide *whether* to communicate only by what all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# torch 2.13 has new names for these two and warns about the old ones; older versions have only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingRows:
    """A gather of rows under way."""

    def __init__(self, work: dist.Work, rows: torch.Tensor) -> None:
        self._work = work
        self._rows = rows

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._rows


class Collectives:
    """Args:
    device: where tensors of collectives live; the process group's backend must know it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def all_gather_flat(self, flat: torch.Tensor, chunk: torch.Tensor) -> None:
        """Fills `flat` [world * n] with every rank's `chunk` [n], any device; returns when `chunk` may be reused."""
        if self.world_size == 1:
            flat.copy_(chunk, non_blocking=True)
        else:
            _all_gather(flat, chunk.to(flat.device, non_blocking=True))
        if flat.is_cuda:
            # The host must not give the chunk's memory back while the device still reads from it.
            torch.cuda.current_stream(flat.device).synchronize()

    def reduce_scatter_mean(self, chunk: torch.Tensor, flat: torch.Tensor) -> None:
        """`chunk` [n] becomes this rank's part of the mean over ranks of `flat` [world * n], which is overwritten.

        Divides before it adds, as DDP does: a sum of many fp16 gradients would overflow.
        """
        _reduce_scatter(chunk, flat.div_(self.world_size))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Every rank's `tensor` becomes that of rank `source`."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=source)

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Every rank's `row` [n], as [world, n]."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype, device=self.device)
        _all_gather(rows, row.to(self.device))
        return rows.view(self.world_size, -1)

    def start_gather_rows(self, row: torch.Tensor, what: str) -> PendingRows:
        """Every rank's `row` [n] on the CPU, as [world, n], world size > 1. Does not wait."""
        rows = torch.empty(self.world_size, row.numel(), dtype=row.dtype)
        work = _all_gather(rows.view(-1), row, async_op=True)
        return PendingRows(work, rows)

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self.world_size == 1 or not flags:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor.tolist()]

    def gather_ids(self, identity: bytes) -> list[bytes]:
        """Every rank's `identity`, all of one length."""
        rows = self.gather_rows(torch.tensor(list(identity), dtype=torch.uint8))
        return [bytes(row) for row in rows.tolist()]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's `content`, of any lengths."""
        sizes = [int(size) for (size,) in self.gather_rows(torch.tensor([len(content)])).tolist()]
        row = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        row[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        rows = self.gather_rows(row).cpu()
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_id(self, identity: bytes) -> bytes:
        """Rank 0's `identity`, all of one length."""
        return self.gather_ids(identity)[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            self.any_rank([True])
