"""The collectives of one ZeRO-3 step, on torch.distributed.

Owns the engine's process groups. At world size 1 nothing is communicated and none is needed. Every rank must make the
same calls in the same order: callers decide *whether* to communicate only by what all ranks know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer_client.errors import CollectiveError, CollectiveTimeoutError
from trainer_client.ranks.watch import Watch
from trainer_client.recorder import Cause, Link, Recorder

# torch 2.13 has new names for these two and warns about the old ones; older versions have only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The process groups; see [Note: process groups]. The last one is of the host, whatever the device.
_MAIN, _UNITS, _CONTROL = range(3)

# Of the message of an error that other ranks are shown.
_SHOWN_CHARACTERS = 300

# For the groups of a rank that has given up to end.
_END_SECONDS = 10.0


def _end(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        with suppress(RuntimeError, ValueError):  # torch.distributed itself has been ended meanwhile
            dist.destroy_process_group(groups.pop(0))


class PendingRows:
    """Rows [world, n] of all ranks, under way since `begun`, in seconds of time.monotonic(): before `work` was made, so
    that its time is not up before ours."""

    def __init__(self, collectives: Collectives, work: dist.Work, rows: torch.Tensor, what: str, begun: float) -> None:
        self._collectives = collectives
        self._work = work
        self._rows = rows
        self._what = what
        self._begun = begun

    def wait(self) -> torch.Tensor:
        """Raises CollectiveError."""
        with self._collectives.within(self._what, self._begun):
            self._work.wait()
        return self._rows


class Collectives:
    """Args:
    device: where tensors of collectives live; the process group's backend must know it.
    timeout_seconds: how long a rank waits for the others in one collective.
    recorder: is told what is waited for and moved.

    Every method that communicates raises CollectiveError where other ranks do not take part, CollectiveTimeoutError
    among them. Nothing can be communicated after it.

    [Note: process groups] Ranks that are at different points of the program must not meet in one collective: gloo ends
    the process where the sizes differ, and mixes the bytes where they do not. Gathers of units, which a rank may come
    to where another does not, have a process group of their own, and so has the exchange that precedes them; the
    exchange of orders differs from that of headers by its kind. All others alternate with agreements, which hold a rank
    that is ahead.
    """

    def __init__(self, device: torch.device, timeout_seconds: float = 1800.0, recorder: Recorder | None = None) -> None:
        self.device = device
        self._recorder = recorder or Recorder()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._timeout_seconds = timeout_seconds
        self._groups: list[dist.ProcessGroup] = []
        self._watch: Watch | None = None
        # Destroys the process groups once this rank has given up.
        self._ending: threading.Thread | None = None
        # Says in what this rank has failed, and why; None: it has not given up.
        self._given_up: str | None = None
        if self.world_size > 1:
            timeout = timedelta(seconds=timeout_seconds)
            self._groups = [
                dist.new_group(timeout=timeout),
                dist.new_group(timeout=timeout),
                dist.new_group(timeout=timeout, backend="gloo"),
            ]
            # A connection of its own: the watch never waits for what training does with the store, nor the reverse.
            store: Any = self._groups[_MAIN].get_group_store()
            store = store.clone()
            self._watch = Watch(store, self.rank, self.world_size, timeout_seconds)

    def close(self) -> None:
        """Leaves the process groups; idempotent."""
        if self._watch is not None:
            self._watch.close()
        groups, self._groups = self._groups, []
        for group in groups:
            dist.destroy_process_group(group)
        if self._ending is not None:
            # The others have given up as well, or will soon. gloo ends a process that exits meanwhile with SIGABRT.
            self._ending.join(_END_SECONDS)

    def give_up(self, what: str, error: BaseException) -> None:
        """Leave the process groups for good, because this rank has failed in `what` and cannot stay in step with the
        others any more: those that wait for it have an error at once instead of after their time-out, and this rank's
        later collectives raise. Does not wait; idempotent."""
        if self._watch is None or self._given_up is not None:
            return
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:_SHOWN_CHARACTERS]
        self._given_up = f"{what} ({why})"
        self._watch.give_up(what, why)
        groups, self._groups = self._groups, []
        # gloo ends a group when what was begun in it has ended, and an exchange may wait for another rank.
        self._ending = threading.Thread(target=_end, args=(groups,), name="paramserver-give-up", daemon=True)
        self._ending.start()

    def _require_part(self) -> None:
        """Raise CollectiveError where this rank has given up."""
        if self._given_up is not None:
            raise CollectiveError(
                f"this rank takes part in no collective any more, because it has failed in {self._given_up}: restart "
                "the job, it resumes from the last commit"
            )

    @contextmanager
    def within(self, what: str, begun: float | None = None) -> Iterator[None]:
        """A collective, `begun` now or then; `what` is for people. Its failure becomes a CollectiveError."""
        if self._watch is None:
            yield
            return
        self._require_part()
        begun = time.monotonic() if begun is None else begun
        try:
            with self._watch.within(what), self._recorder.waiting(Cause.RANKS, what):
                yield
        except RuntimeError as error:  # torch.distributed has no narrower one for gloo
            timed_out = time.monotonic() - begun >= self._timeout_seconds
            kind = CollectiveTimeoutError if timed_out else CollectiveError
            reason = (
                f"did not end within {self._timeout_seconds:g} s (paramserver.collective_timeout_seconds)"
                if timed_out
                else f"failed, another rank has gone or given up ({error})"
            )
            raise kind(
                f"{what} {reason}: {self._watch.places()}. All ranks must make the same calls in the same order; "
                "restart the job, it resumes from the last commit"
            ) from error

    @contextmanager
    def _moving(self, what: str, flat: torch.Tensor) -> Iterator[None]:
        began = time.monotonic()
        with self.within(what):
            yield
        self._recorder.moved(Link.COLLECTIVES, what, flat.nbytes, began)

    def gather_unit(self, flat: torch.Tensor, chunk: torch.Tensor, what: str) -> None:
        """As `all_gather_flat`, for a unit that all ranks have confirmed; see lockstep.py."""
        self._gather_flat(flat, chunk, what, _UNITS)

    def all_gather_flat(self, flat: torch.Tensor, chunk: torch.Tensor, what: str = "a gather of weights") -> None:
        """Fills `flat` [world * n] with every rank's `chunk` [n], any device; returns when `chunk` may be reused."""
        self._gather_flat(flat, chunk, what, _MAIN)

    def _gather_flat(self, flat: torch.Tensor, chunk: torch.Tensor, what: str, group: int) -> None:
        if self.world_size == 1:
            flat.copy_(chunk, non_blocking=True)
        else:
            with self._moving(what, flat):
                _all_gather(flat, chunk.to(flat.device, non_blocking=True), group=self._groups[group])
        if flat.is_cuda:
            # The host must not give the chunk's memory back while the device still reads from it.
            torch.cuda.current_stream(flat.device).synchronize()

    def reduce_scatter_mean(
        self, chunk: torch.Tensor, flat: torch.Tensor, what: str = "a reduction of gradients"
    ) -> None:
        """`chunk` [n] becomes this rank's part of the mean over ranks of `flat` [world * n], which is overwritten.

        Divides before it adds, as DDP does: a sum of many fp16 gradients would overflow.
        """
        with self._moving(what, flat):
            _reduce_scatter(chunk, flat.div_(self.world_size), group=self._groups[_MAIN])

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Every rank's `tensor` becomes that of rank `source`."""
        if self.world_size > 1:
            with self.within("a broadcast"):
                dist.broadcast(tensor, src=source, group=self._groups[_MAIN])

    def gather_rows(self, row: torch.Tensor, what: str = "an exchange") -> torch.Tensor:
        """Every rank's `row` [n], as [world, n]."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype, device=self.device)
        with self.within(what):
            _all_gather(rows, row.to(self.device), group=self._groups[_MAIN])
        return rows.view(self.world_size, -1)

    def start_gather_headers(self, header: torch.Tensor, what: str) -> PendingRows:
        """Every rank's `header` [n] on the CPU, one n always, world size > 1. Does not wait."""
        self._require_part()
        rows = torch.empty(self.world_size, header.numel(), dtype=header.dtype)
        begun = time.monotonic()
        work = _all_gather(rows.view(-1), header, group=self._groups[_CONTROL], async_op=True)
        return PendingRows(self, work, rows, what, begun)

    def start_exchange(self, row: torch.Tensor, what: str) -> PendingRows:
        """Every rank's `row` [n] of integers on the CPU, one n always, world size > 1. Does not wait."""
        self._require_part()
        rows = torch.zeros(self.world_size, row.numel(), dtype=row.dtype)
        rows[self.rank] = row
        begun = time.monotonic()
        work = dist.all_reduce(rows, group=self._groups[_CONTROL], async_op=True)
        return PendingRows(self, work, rows, what, begun)

    def any_rank(self, flags: Sequence[bool], what: str = "an agreement") -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self.world_size == 1 or not flags:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        with self.within(what):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._groups[_MAIN])
        return [bool(flag) for flag in tensor.tolist()]

    def gather_ids(self, identity: bytes, what: str = "an exchange") -> list[bytes]:
        """Every rank's `identity`, all of one length."""
        rows = self.gather_rows(torch.tensor(list(identity), dtype=torch.uint8), what)
        return [bytes(row) for row in rows.tolist()]

    def gather_bytes(self, content: bytes, what: str = "an exchange") -> list[bytes]:
        """Every rank's `content`, of any lengths."""
        sizes = [int(size) for (size,) in self.gather_rows(torch.tensor([len(content)]), what).tolist()]
        row = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        row[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        rows = self.gather_rows(row, what).cpu()
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_id(self, identity: bytes) -> bytes:
        """Rank 0's `identity`, all of one length."""
        return self.gather_ids(identity)[0]

    def barrier(self, what: str = "a barrier") -> None:
        if self.world_size > 1:
            self.any_rank([True], what)
