"""The collectives of a training run, on torch.distributed.

Owns the engine's process groups; at world size 1 there is none, and nothing is communicated. All ranks must make the
same calls in the same order, so a caller may decide *whether* to communicate only from what all ranks know.
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

# Indexes of the process groups; see [Note: process groups]. The last one communicates CPU tensors on any device.
_MAIN, _UNITS, _CONTROL = range(3)

# The longest text of an error that is shown to other ranks.
_SHOWN_CHARACTERS = 300

# The time that `close` waits for the process groups of a rank that has abandoned the run to end.
_END_SECONDS = 10.0


def _end(groups: list[dist.ProcessGroup]) -> None:
    while groups:
        # The errors occur if torch.distributed itself has been ended meanwhile.
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(groups.pop(0))


class PendingRows:
    """The future of rows [world, n], one of each rank.

    `begun` is a reading of time.monotonic() from before `work` was made. When torch's time-out ends the work, the time
    since `begun` is therefore at least the time-out, so this rank knows that the reason is the time-out.
    """

    def __init__(self, collectives: Collectives, work: dist.Work, rows: torch.Tensor, what: str, begun: float) -> None:
        self._collectives = collectives
        self._work = work
        self._rows = rows
        self._what = what
        self._begun = begun

    def wait(self) -> torch.Tensor:
        """Wait for the rows and return them. Raises CollectiveError."""
        with self._collectives.within(self._what, self._begun):
            self._work.wait()
        return self._rows


class Collectives:
    """The collectives of one rank.

    Every method that communicates raises CollectiveError if other ranks do not take part, as CollectiveTimeoutError
    after the time-out. This rank cannot communicate any more after that.

    Args:
        device: where tensors of collectives live; the process group's backend must support it.
        timeout_seconds: how long a rank waits for the others in one collective.
        recorder: records waits and moved bytes.

    [Note: process groups] Ranks that are at different points of the program must not meet in one collective: gloo ends
    the process if the sizes differ, and mixes the bytes if they do not. Three process groups prevent that:

    - _UNITS has only the gathers of units, because a rank may begin one while another rank is elsewhere;
    - _CONTROL has the exchanges that precede those gathers. Headers of gathers use another kind of collective there
      than orders of reductions, so gloo cannot take one for the other;
    - _MAIN has all others, which alternate with agreements of all ranks, where a rank that is ahead waits.
    """

    def __init__(self, device: torch.device, timeout_seconds: float = 1800.0, recorder: Recorder | None = None) -> None:
        self.device = device
        self._recorder = recorder or Recorder()
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._timeout_seconds = timeout_seconds
        self._groups: list[dist.ProcessGroup] = []
        self._watch: Watch | None = None
        # The thread that destroys the process groups after `abandon`.
        self._ending: threading.Thread | None = None
        # The collective in which this rank has failed, and the error, as text; None: it has not failed.
        self._abandoned: str | None = None
        if self.world_size > 1:
            timeout = timedelta(seconds=timeout_seconds)
            self._groups = [
                dist.new_group(timeout=timeout),
                dist.new_group(timeout=timeout),
                dist.new_group(timeout=timeout, backend="gloo"),
            ]
            # The clone is a connection of its own, so that the watch and the training never wait for each other.
            store: Any = self._groups[_MAIN].get_group_store()
            store = store.clone()
            self._watch = Watch(store, self.rank, self.world_size, timeout_seconds)

    def close(self) -> None:
        """Leave the process groups; idempotent."""
        if self._watch is not None:
            self._watch.close()
        groups, self._groups = self._groups, []
        for group in groups:
            dist.destroy_process_group(group)
        if self._ending is not None:
            # gloo ends a process with SIGABRT that exits while groups are being destroyed. The wait is short, because
            # the other ranks abandon the run as well.
            self._ending.join(_END_SECONDS)

    def abandon(self, what: str, error: BaseException) -> None:
        """Leave the process groups for good, because this rank has failed in `what` and others may be ahead of it.

        Ranks that wait for this one get an error at once instead of after their time-out, and later collectives of this
        rank raise. Does not wait; idempotent. See tests/integration/test_failing_ranks.py.
        """
        if self._watch is None or self._abandoned is not None:
            return
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:_SHOWN_CHARACTERS]
        self._abandoned = f"{what} ({why})"
        self._watch.abandon(what, why)
        groups, self._groups = self._groups, []
        # This needs a thread, because gloo destroys a group only when its pending collectives have ended, and one of
        # them may wait for another rank.
        self._ending = threading.Thread(target=_end, args=(groups,), name="paramserver-abandon", daemon=True)
        self._ending.start()

    def _require_part(self) -> None:
        """Raise CollectiveError if this rank has abandoned the run."""
        if self._abandoned is not None:
            raise CollectiveError(
                f"this rank cannot join collectives any more, because it has failed in {self._abandoned}: restart the "
                "job, it resumes from the last commit"
            )

    @contextmanager
    def within(self, what: str, begun: float | None = None) -> Iterator[None]:
        """Enclose a collective, or the wait for one; its failure becomes a CollectiveError.

        Args:
            what: name of the collective in messages.
            begun: when it was begun, in seconds of time.monotonic(); None: now.
        """
        if self._watch is None:
            yield
            return
        self._require_part()
        begun = time.monotonic() if begun is None else begun
        try:
            with self._watch.within(what), self._recorder.waiting(Cause.RANKS, what):
                yield
        # torch.distributed raises no narrower class for gloo.
        except RuntimeError as error:
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

    def gather_unit(self, flat: torch.Tensor, partition: torch.Tensor, what: str) -> None:
        """Gather a unit that all ranks have confirmed (see lockstep.py); arguments as in `all_gather_flat`."""
        self._gather_flat(flat, partition, what, _UNITS)

    def all_gather_flat(self, flat: torch.Tensor, partition: torch.Tensor, what: str = "a gather of weights") -> None:
        """Fill `flat` [world * n] with every rank's `partition` [n], on any device; return when that may be reused."""
        self._gather_flat(flat, partition, what, _MAIN)

    def _gather_flat(self, flat: torch.Tensor, partition: torch.Tensor, what: str, group: int) -> None:
        if self.world_size == 1:
            flat.copy_(partition, non_blocking=True)
        else:
            with self._moving(what, flat):
                _all_gather(flat, partition.to(flat.device, non_blocking=True), group=self._groups[group])
        if flat.is_cuda:
            # The caller may free the partition's memory next, so the device must have finished reading from it.
            torch.cuda.current_stream(flat.device).synchronize()

    def reduce_scatter(
        self, partition: torch.Tensor, flat: torch.Tensor, what: str = "a reduction of gradients", *, mean: bool = True
    ) -> None:
        """Set `partition` [n] to this rank's part of the mean over ranks of `flat` [world * n], which is overwritten.

        The division comes before the addition, as in DDP, because a sum of many fp16 gradients would overflow.

        Args:
            mean: False: `partition` is of the sum, which is not divided.
        """
        with self._moving(what, flat):
            _reduce_scatter(partition, flat.div_(self.world_size) if mean else flat, group=self._groups[_MAIN])

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite every rank's `tensor` with that of rank `source`."""
        if self.world_size > 1:
            with self.within("a broadcast"):
                dist.broadcast(tensor, src=source, group=self._groups[_MAIN])

    def gather_rows(self, row: torch.Tensor, what: str = "an exchange") -> torch.Tensor:
        """Return the `row` [n] of every rank, as [world, n]."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype, device=self.device)
        with self.within(what):
            _all_gather(rows, row.to(self.device), group=self._groups[_MAIN])
        return rows.view(self.world_size, -1)

    def start_gather_headers(self, header: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a `header` [n] of every rank. Does not wait.

        All headers are CPU tensors of the same size n. Needs a world size above 1.
        """
        self._require_part()
        rows = torch.empty(self.world_size, header.numel(), dtype=header.dtype)
        begun = time.monotonic()
        work = _all_gather(rows.view(-1), header, group=self._groups[_CONTROL], async_op=True)
        return PendingRows(self, work, rows, what, begun)

    def start_exchange(self, row: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a `row` [n] of integers of every rank. Does not wait.

        All rows are CPU tensors of the same size n. Needs a world size above 1.
        """
        self._require_part()
        rows = torch.zeros(self.world_size, row.numel(), dtype=row.dtype)
        rows[self.rank] = row
        begun = time.monotonic()
        work = dist.all_reduce(rows, group=self._groups[_CONTROL], async_op=True)
        return PendingRows(self, work, rows, what, begun)

    def any_rank(self, flags: Sequence[bool], what: str = "an agreement") -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        if self.world_size == 1 or not flags:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        with self.within(what):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._groups[_MAIN])
        return [bool(flag) for flag in tensor.tolist()]

    def gather_ids(self, identity: bytes, what: str = "an exchange") -> list[bytes]:
        """Return every rank's `identity`; all have the same length."""
        rows = self.gather_rows(torch.tensor(list(identity), dtype=torch.uint8), what)
        return [bytes(row) for row in rows.tolist()]

    def gather_bytes(self, content: bytes, what: str = "an exchange") -> list[bytes]:
        """Return every rank's `content`; lengths may differ."""
        sizes = [int(size) for (size,) in self.gather_rows(torch.tensor([len(content)]), what).tolist()]
        row = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        row[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
        rows = self.gather_rows(row, what).cpu()
        return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_id(self, identity: bytes) -> bytes:
        """Return the `identity` of rank 0. The ranks must pass identities of the same length. A collective."""
        return self.gather_ids(identity)[0]

    def barrier(self, what: str = "a barrier") -> None:
        if self.world_size > 1:
            self.any_rank([True], what)
