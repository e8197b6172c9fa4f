"""The collectives of a training run, on torch.distributed.

This module owns which process group each collective runs in, and its order with the work of the device. At world size 1
there is no process group, and nothing is communicated. All ranks must make the same calls in the same order, so a
caller may decide *whether* to communicate only from values that are the same on all ranks. This module must never make
or leave a process group, which process_groups.py does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainer_client.base.device import CPU
from trainer_client.base.lanes.device_lanes import make_lanes
from trainer_client.base.recorder import Link, Recorder
from trainer_client.training.ranks.process_groups import CONTROL, HOST, TENSORS, UNITS, ProcessGroups

# torch 2.13 has new names for all_gather_into_tensor and reduce_scatter_tensor, and warns if the old names are used.
# Older versions have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingRows:
    """An exchange under way, in which every rank gives a tensor [n], its row; `wait` returns all rows [world, n].

    `begun` is a reading of time.monotonic() from before `work` was made. When torch's time-out ends the work, the time
    since `begun` is therefore at least the time-out, so this rank knows that the reason is the time-out.
    """

    def __init__(
        self, process_groups: ProcessGroups, work: dist.Work, rows: torch.Tensor, what: str, begun: float
    ) -> None:
        self._process_groups = process_groups
        self._work = work
        self._rows = rows
        self._what = what
        self._begun = begun

    def wait(self) -> torch.Tensor:
        """Wait until every rank has given its row, and return the rows [world, n]. It can raise CollectiveError."""
        with self._process_groups.within(self._what, self._begun):
            self._process_groups.wait_for(self._work)
        return self._rows


class Collectives:
    """The collectives of one rank: the engine's gathers, reductions and exchanges of flags go through this object.

    Every method that communicates raises CollectiveError if other ranks do not take part, and its subclass
    CollectiveTimeoutError after the time-out. After such an error this rank cannot communicate any more.

    Each collective of tensors on an accelerator is work of the comm lane (see base/lanes/device_lanes.py), for which
    the host does not wait. If such a collective fails, the next wait raises the error: the wait for a lane, or an
    exchange between the hosts.

    Args:
        device: where this rank computes.
        timeout_seconds: how long a rank waits for the others in one collective.
        recorder: records waits for other ranks, and the bytes that collectives move.
    """

    def __init__(self, device: torch.device, timeout_seconds: float = 1800.0, recorder: Recorder | None = None) -> None:
        self.device = device
        self.lanes = make_lanes(device)
        self._recorder = recorder or Recorder()
        self._recorder.measure_with(self.lanes.stopwatch)
        self.lanes.report_copies_in(self._recorder.copied_to_device)
        self.process_groups = ProcessGroups(device, timeout_seconds, self._recorder)
        self.rank = self.process_groups.rank
        self.world_size = self.process_groups.world_size
        if self.world_size > 1:
            self.process_groups.start_pulse(partial(self.gather_bytes, what="the exchange of addresses"))
            self.lanes.wait_with(self.process_groups.wait_for_event)

    def close(self) -> None:
        """End the lanes, and then leave the process groups; idempotent."""
        self.lanes.close()
        self.process_groups.close()

    def _run(
        self, what: str, index: int, collective: Callable[..., dist.Work | None], *arguments: Any, **options: Any
    ) -> None:
        """Run a collective in a process group: to its end for CPU tensors; else it is queued on the device's stream."""
        with self.process_groups.within(what):
            on_host = self._is_on_host(index)
            work = collective(*arguments, group=self.process_groups.group(index), async_op=on_host, **options)
            if work is not None:
                self.process_groups.wait_for(work)

    def _is_on_host(self, index: int) -> bool:
        """Return whether the process group with this index is one of gloo, which moves bytes of host memory."""
        return index in (HOST, CONTROL) or self.device.type == CPU

    def _index_for(self, tensor: torch.Tensor) -> int:
        """Return the index of the process group for a collective of weights or gradients in `tensor`."""
        return TENSORS if tensor.device.type == self.device.type else HOST

    @contextmanager
    def _moving(self, what: str, flat: torch.Tensor) -> Iterator[None]:
        stopwatch = self.lanes.stopwatch()
        yield
        stopwatch.stop(partial(self._recorder.moved, Link.COLLECTIVES, what, flat.nbytes))

    @contextmanager
    def _in_line(self) -> Iterator[None]:
        """Enclose a collective for which the current stream waits at the end, also if the enclosed code raises.

        The lanes need not keep the collective's tensors alive. Memory that is freed after the stream's wait is used
        again only by later work of that stream, when the collective has ended.
        """
        try:
            with self.lanes.communicating():
                yield
        finally:
            self.lanes.rejoin()

    def gather_unit(self, flat: torch.Tensor, partition: torch.Tensor, what: str) -> None:
        """Gather a unit that all ranks have confirmed (see lockstep.py), within the context of `Lanes.gathering`.

        The arguments are those of `all_gather_flat`; the context of `Lanes.gathering` returns both tensors.
        """
        if self.world_size > 1:
            with self._moving(what, flat):
                self._run(what, UNITS, _all_gather, flat, partition)
        elif partition is not flat:
            flat.copy_(partition)

    def all_gather_flat(self, flat: torch.Tensor, partition: torch.Tensor, what: str = "a gather of weights") -> None:
        """Fill `flat` [world * n] with the `partition` [n] of every rank, on any device.

        When the call returns, the caller may write to `partition` again.
        """
        if self.world_size == 1:
            flat.copy_(partition)
            return
        with self._in_line(), self._moving(what, flat):
            self._run(what, self._index_for(flat), _all_gather, flat, partition.to(flat.device))

    def reduce_scatter(
        self, partition: torch.Tensor, flat: torch.Tensor, what: str = "a reduction of gradients", *, mean: bool = True
    ) -> None:
        """Set `partition` [n] to this rank's part of the mean over ranks of `flat` [world * n]. `flat` is overwritten.

        On an accelerator, call `Lanes.rejoin` before other work than collectives uses the result.

        The division comes before the addition, as in DDP, because a sum of many fp16 gradients would overflow.

        Args:
            mean: if False, `partition` is set to the sum over ranks, without a division.
        """
        with self.lanes.communicating(partition, flat), self._moving(what, flat):
            summed, index = flat.div_(self.world_size) if mean else flat, self._index_for(flat)
            if self._is_on_host(index):
                # On gloo this rank calls all_reduce, and takes its part of the sum. gloo's reduce_scatter would also
                # make an all-reduce, of a copy, but its wait ignores its time-out, so the rank could not check whether
                # another rank has gone.
                self._run(what, index, dist.all_reduce, summed)
                partition.copy_(summed.chunk(self.world_size)[self.rank])
            else:
                self._run(what, index, _reduce_scatter, partition, summed)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite every rank's `tensor` with the `tensor` of rank `source`."""
        if self.world_size > 1:
            with self._in_line():
                self._run("a broadcast", self._index_for(tensor), dist.broadcast, tensor, src=source)

    def gather_rows(self, row: torch.Tensor, what: str = "an exchange") -> torch.Tensor:
        """Return the tensors `row` [n] of all ranks, as [world, n] on the CPU. All ranks must call this."""
        row = row.cpu()
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype)
        self._run(what, HOST, _all_gather, rows, row)
        return rows.view(self.world_size, -1)

    def start_gather_headers(self, header: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a `header` [n] of every rank, and return at once.

        All headers are CPU tensors of the same size n. The world size must be above 1.
        """
        self.process_groups.require_part()
        rows = torch.empty(self.world_size, header.numel(), dtype=header.dtype)
        begun = time.monotonic()
        work = _all_gather(rows.view(-1), header, group=self.process_groups.group(CONTROL), async_op=True)
        return PendingRows(self.process_groups, work, rows, what, begun)

    def start_exchange(self, row: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a tensor `row` [n] of integers of every rank, and return at once.

        All rows are CPU tensors of the same size n. The world size must be above 1.
        """
        self.process_groups.require_part()
        rows = torch.zeros(self.world_size, row.numel(), dtype=row.dtype)
        rows[self.rank] = row
        begun = time.monotonic()
        work = dist.all_reduce(rows, group=self.process_groups.group(CONTROL), async_op=True)
        return PendingRows(self.process_groups, work, rows, what, begun)

    def any_rank(self, flags: Sequence[bool], what: str = "an agreement") -> list[bool]:
        """Return for each flag whether any rank has set it. All ranks must call this with as many flags."""
        if self.world_size == 1 or not flags:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        self._run(what, HOST, dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor.tolist()]

    def gather_ids(self, identity: bytes, what: str = "an exchange") -> list[bytes]:
        """Return every rank's `identity`, in the order of the ranks. All identities must have the same length."""
        rows = self.gather_rows(torch.tensor(list(identity), dtype=torch.uint8), what)
        return [bytes(row) for row in rows.tolist()]

    def gather_bytes(self, content: bytes, what: str = "an exchange") -> list[bytes]:
        """Return every rank's `content`, in the order of the ranks; lengths may differ. All ranks must call this."""
        sizes = [int(size) for (size,) in self.gather_rows(torch.tensor([len(content)]), what).tolist()]
        row = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if content:
            row[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        rows = self.gather_rows(row, what)
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_id(self, identity: bytes) -> bytes:
        """Return the `identity` of rank 0. The ranks must pass identities of the same length.

        All ranks must call this.
        """
        return self.gather_ids(identity)[0]

    def barrier(self, what: str = "a barrier") -> None:
        if self.world_size > 1:
            self.any_rank([True], what)
