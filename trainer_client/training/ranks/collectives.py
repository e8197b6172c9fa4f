"""The collectives of a training run, on torch.distributed.

This module owns the engine's process groups; at world size 1 there is none, and nothing is communicated. All ranks must
make the same calls in the same order, so a caller may decide *whether* to communicate only from what all ranks know.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainer_client.base.device import CPU, backend_of
from trainer_client.base.lanes.device_lanes import make_lanes
from trainer_client.base.recorder import Cause, Link, Recorder
from trainer_client.comm import environment_default, lazily_connected
from trainer_client.errors import CollectiveError, CollectiveTimeoutError
from trainer_client.training.ranks.pulse import Pulse, host_of
from trainer_client.training.ranks.watch import Watch

# torch 2.13 has new names for these two and warns about the old ones; older versions have only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Indexes of the process groups; see [Note: process groups].
_HOST, _CONTROL, _UNITS, _TENSORS = range(4)

# The longest text of an error that is shown to other ranks.
_SHOWN_CHARACTERS = 300

# The time that `close` waits for the process groups of a rank that has abandoned the run to end.
_END_SECONDS = 10.0
# A rank that waits looks this often whether another one has gone.
_LOOK = timedelta(seconds=0.5)
# The pauses between two looks whether a device has come to an event: the first one, and the longest.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 20e-6, 1e-3
# A rank that has closed its session takes part in nothing any more, but the bytes that it has sent may be under way.
_UNDER_WAY_SECONDS = 5.0
# This variable says how NCCL's watchdog acts on an error or a time-out. Its default ends the process by SIGABRT, and
# no message says where the ranks were. 0 leaves both to the waits of this module, which know it.
_WATCHDOG_VARIABLE, _WATCHDOG_OFF = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"


def _make_groups(device: torch.device, timeout: timedelta) -> list[dist.ProcessGroup]:
    """Return the four groups of [Note: process groups]. All ranks must call this."""
    on_host = (_HOST, _CONTROL, _UNITS, _TENSORS) if device.type == CPU else (_HOST, _CONTROL)
    with lazily_connected():
        host = [dist.new_group(timeout=timeout, backend="gloo") for _ in on_host]
    if device.type == CPU:
        return host
    with environment_default(_WATCHDOG_VARIABLE, _WATCHDOG_OFF):
        communicator = dist.new_group(timeout=timeout, backend=backend_of(device.type))
    return [*host, communicator, communicator]


def _end(groups: list[dist.ProcessGroup], *, abort: bool) -> None:
    """End the groups, and empty the list: the last reference to a group has to go here, because that may wait for long.

    Args:
        abort: whether to end the collectives under way first, because a device waits for the other ranks in them
            without end. gloo cannot: its collectives end when another rank's connection does.
    """
    while groups:
        # The errors occur if torch.distributed itself has been ended meanwhile, and for a group that is there twice.
        with suppress(RuntimeError, ValueError):
            if abort:
                groups[0].abort()
            dist.destroy_process_group(groups[0])
        del groups[0]


class _RankGoneError(RuntimeError):
    """Another rank has gone, so the collective under way cannot end."""


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
        """Wait for the rows and return them. It can raise CollectiveError."""
        with self._collectives.within(self._what, self._begun):
            self._collectives.wait_for(self._work)
        return self._rows


class Collectives:
    """The collectives of one rank.

    Every method that communicates raises CollectiveError if other ranks do not take part, as CollectiveTimeoutError
    after the time-out. This rank cannot communicate any more after that.

    Each collective of tensors on an accelerator is work of the comm lane (see base/lanes/device_lanes.py), for which
    the host does not wait. Its failure is an error of the next wait: of one of the lanes, or of an exchange between the
    hosts.

    Args:
        device: where this rank computes.
        timeout_seconds: how long a rank waits for the others in one collective.
        recorder: records waits and moved bytes.

    [Note: process groups] Ranks that are at different points of the program must not meet in one collective: gloo ends
    the process if the sizes differ, and mixes the bytes if they do not. Several process groups prevent that:

    - _UNITS has only the gathers of units, because a rank may begin one while another rank is elsewhere;
    - _TENSORS has the other collectives of weights and gradients, which alternate with agreements of all ranks, where
      a rank that is ahead waits;
    - _CONTROL has the exchanges that precede gathers of units. Headers of gathers use another kind of collective there
      than orders of reductions, so gloo cannot take one for the other;
    - _HOST has what the hosts tell each other: flags, norms, names.

    A job on several nodes has one group more, for `lowest_beside`. Its thread goes on while a rank is in the next step,
    or waits for something else.

    _CONTROL and _HOST are gloo's, with CPU tensors on any device. If flags went through the device, each question would
    wait until the device has done all that it was given, and ranks could wait for each other in two groups at once.

    [Note: one communicator] On an accelerator, _UNITS and _TENSORS are one group with one communicator, whatever group
    the script has made for itself. NCCL promises no progress for two communicators on one device unless all ranks use
    them in the same order. The calls of one have one order, because lockstep.py and step/reduction_order.py give the
    calls of all ranks the same one. See tests/integration/test_ranks_gone.py.
    """

    def __init__(self, device: torch.device, timeout_seconds: float = 1800.0, recorder: Recorder | None = None) -> None:
        self.device = device
        self.lanes = make_lanes(device)
        self._recorder = recorder or Recorder()
        self._recorder.measure_with(self.lanes.stopwatch)
        self.lanes.report_copies_in(self._recorder.copied_to_device)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._timeout_seconds = timeout_seconds
        self._groups: list[dist.ProcessGroup] = []
        # The group of the thread beside the training; none before `open_beside`.
        self._beside: list[dist.ProcessGroup] = []
        self._watch: Watch | None = None
        self._pulse: Pulse | None = None
        # The threads that destroy process groups whose collectives may be under way.
        self._ending: list[threading.Thread] = []
        # A rank that has gone, for people, and from when on this rank waits for it no longer, in time.monotonic().
        self._gone: tuple[str, float] | None = None
        # The collective in which this rank has failed, and the error, as text; None if it has not failed.
        self._abandoned: str | None = None
        # Whether a collective of `_groups` has failed. It may be under way still, as with a rank that is silent.
        self._has_failed = False
        if self.world_size > 1:
            self._groups = _make_groups(device, timedelta(seconds=timeout_seconds))
            # The clone is a connection of its own, so that the watch and the training never wait for each other.
            store: Any = self._groups[_HOST].get_group_store()
            store = store.clone()
            self._watch = Watch(store, self.rank, self.world_size, timeout_seconds)
            gather = partial(self.gather_bytes, what="the exchange of addresses")
            self._pulse = Pulse(self.rank, gather, host_of(store), partial(self.rank_has_gone, is_closed=False))
            self.lanes.wait_with(self.wait_for_event)

    def close(self) -> None:
        """Leave the process groups; idempotent."""
        self.lanes.close()
        if self._watch is not None:
            self._watch.close()
        if self._pulse is not None:
            self._pulse.close()
        groups, self._groups = self._groups, []
        if self._has_failed:
            self._end_beside_this(groups, abort=self.device.type != CPU)
        else:
            for group in dict.fromkeys(groups):
                # The error occurs if the script has left all groups before, as torch recommends for its end.
                with suppress(ValueError):
                    dist.destroy_process_group(group)
        self.leave_beside()
        for ending in self._ending:
            # gloo ends a process with SIGABRT that exits while groups are being destroyed. The wait is short, because
            # the other ranks abandon the run as well.
            ending.join(_END_SECONDS)

    def abandon(self, what: str, error: BaseException) -> None:
        """Leave the process groups for good, because this rank has failed in `what` and others may be ahead of it.

        Ranks that wait for this one get an error at once instead of after their time-out, and later collectives of this
        rank raise. It does not wait; idempotent. See tests/integration/test_failing_ranks.py.
        """
        if self._watch is None or self._abandoned is not None:
            return
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:_SHOWN_CHARACTERS]
        self._abandoned = f"{what} ({why})"
        news = self._watch.abandon(what, why)
        groups, self._groups = self._groups, []
        # The other ranks look for the reason as soon as they hear of it or the groups end, so it is written before.
        self._end_beside_this(groups, abort=self.device.type != CPU, first=partial(self._tell, self._watch, news))
        self.leave_beside()

    def _tell(self, watch: Watch, news: str) -> None:
        watch.exchange()
        if self._pulse is not None:
            self._pulse.tell(news)

    def _end_beside_this(
        self, groups: list[dist.ProcessGroup], *, abort: bool, first: Callable[[], None] = lambda: None
    ) -> None:
        """Call `first`, and end groups, on a thread of their own; see `_end`.

        gloo destroys a group only when its pending collectives have ended, and one of them may wait for another rank.
        """

        def end() -> None:
            first()
            _end(groups, abort=abort)

        ending = threading.Thread(target=end, name="paramserver-abandon", daemon=True)
        self._ending.append(ending)
        ending.start()

    def rank_has_gone(self, who: str, is_closed: bool) -> None:
        """Take note that another rank will take part in nothing any more. Called from any thread.

        Each collective that waits for it raises CollectiveError soon, instead of after its time-out. gloo mostly
        notices the end of a process by itself, but not that one was stopped; NCCL notices neither. This rank tells
        those of other nodes, unless the other one has closed.

        Args:
            who: the rank and what has become of it, for people.
            is_closed: whether it has left by itself, so that the last collective with it may still end.
        """
        if self._gone is not None:
            return
        if self._pulse is not None and not is_closed:
            self._pulse.tell(who)
        patience = _UNDER_WAY_SECONDS if is_closed else 0.0
        self._gone = who, time.monotonic() + patience
        if self.device.type != CPU:
            aborting = threading.Timer(patience, self._abort_communicator)
            aborting.daemon = True
            aborting.start()

    def _abort_communicator(self) -> None:
        """End what the device has under way with other ranks.

        The training thread may be in a wait of torch for the device, as in a copy of a gradient, which nothing else
        ends. What was copied then has no meaning. No step is made with it, because a step needs an agreement of all
        ranks, and a commit the votes of all.
        """
        for group in self._groups[_TENSORS:]:
            # The error occurs if the group was ended meanwhile.
            with suppress(RuntimeError):
                group.abort()

    def _check_others(self) -> None:
        """Raise _RankGoneError if another rank has gone, as far as the daemon or the pulse says."""
        if self._gone is not None and time.monotonic() >= self._gone[1]:
            raise _RankGoneError(self._gone[0])

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
            self._has_failed = True
            raise self._failure(what, begun, error) from None

    def _failure(self, what: str, begun: float, error: RuntimeError) -> CollectiveError:
        """Return the error of a collective that was begun at a time of time.monotonic() and has failed."""
        assert self._watch is not None
        # The frames of the failed call refer to its process group, and live as long as the error. The last reference to
        # a group has to go on the thread that ends the groups, because gloo may wait for a lost node then. The thread
        # that trains waited 80 s and more for one (tests/integration/test_silent_nodes.py).
        traceback.clear_frames(error.__traceback__)
        timed_out = time.monotonic() - begun >= self._timeout_seconds
        kind = CollectiveTimeoutError if timed_out else CollectiveError
        reason = (
            f"did not end within {self._timeout_seconds:g} s (paramserver.collective_timeout_seconds)"
            if timed_out
            else f"failed, another rank has gone or given up ({error})"
        )
        return kind(
            f"{what} {reason}: {self._watch.places()}. All ranks must make the same calls in the same order; "
            "restart the job, it resumes from the last commit"
        )

    def wait_for(self, work: dist.Work, check: Callable[[], None] = lambda: None) -> None:
        """Wait for a collective of gloo, which has a time-out of its own. For use in `within`.

        Args:
            work: the collective.
            check: is called again and again, and may raise to end the wait.

        Raises:
            RuntimeError: it has failed, or a rank has gone.
        """
        while True:
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if work.is_completed():
                    # It has ended since, or has failed: then this raises torch's error.
                    work.wait()
                    return
                check()
                self._check_others()
            else:
                return

    def open_beside(self) -> None:
        """Make the process group for `lowest_beside`. All ranks must call this."""
        if self.world_size > 1:
            self._beside.append(dist.new_group(timeout=timedelta(seconds=self._timeout_seconds), backend="gloo"))

    def lowest_beside(self, value: int, what: str, check: Callable[[], None]) -> int:
        """Return the lowest `value` of all ranks, for a thread beside the training, whose collectives go on meanwhile.

        That thread of each rank must make the same calls in the same order.

        Args:
            value: this rank's value.
            what: name of the exchange in messages.
            check: is called again and again, and raises to end the wait.

        Raises:
            CollectiveError: another rank did not take part.
        """
        if self._watch is None:
            return value
        groups, lowest, begun = self._beside, torch.tensor([value]), time.monotonic()

        def check_part() -> None:
            self._require_part()
            check()

        # `abandon` has emptied the list, or does so while this waits.
        check_part()
        try:
            work = dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=groups[0], async_op=True)
            assert work is not None
            self.wait_for(work, check_part)
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise self._failure(what, begun, error) from None
        return int(lowest)

    def require_others(self, what: str, begun: float) -> None:
        """Check that no other rank has gone, for a thread beside the training that waits for something else.

        Args:
            what: name of the wait in messages.
            begun: when it was begun, in seconds of time.monotonic().

        Raises:
            CollectiveError: the daemon or the pulse says that another rank has gone.
        """
        try:
            self._check_others()
        except _RankGoneError as error:
            raise self._failure(what, begun, error) from None

    def leave_beside(self) -> None:
        """Leave the process group of `lowest_beside`, so that calls of other ranks fail that wait for this one.

        It does not wait; idempotent.
        """
        groups, self._beside = self._beside, []
        if groups:
            self._end_beside_this(groups, abort=False)

    def wait_for_event(self, event: torch.Event) -> None:
        """Wait until the device has come to an event, which may come after collectives.

        Raises:
            CollectiveError: that takes longer than the time-out, or a rank has gone.
        """
        begun = time.monotonic()
        try:
            self._wait_until(event.query)
        except RuntimeError as error:
            with self.within("a collective of the device", begun):
                raise RuntimeError(str(error)) from None

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for a device, of which torch raises nothing if other ranks do not take part.

        It can raise RuntimeError.
        """
        begun, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while not is_done():
            self._check_others()
            if time.monotonic() - begun >= self._timeout_seconds:
                raise RuntimeError("the device still waits for other ranks")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _run(
        self, what: str, index: int, collective: Callable[..., dist.Work | None], *arguments: Any, **options: Any
    ) -> None:
        """Run a collective in a process group: to its end for CPU tensors; for others it is put on the stream."""
        with self.within(what):
            on_host = self._is_on_host(index)
            work = collective(*arguments, group=self._groups[index], async_op=on_host, **options)
            if work is not None:
                self.wait_for(work)

    def _is_on_host(self, index: int) -> bool:
        """Return whether a process group is one of gloo, which moves bytes of host memory."""
        return index in (_HOST, _CONTROL) or self.device.type == CPU

    def _index_for(self, tensor: torch.Tensor) -> int:
        """Return the process group for a collective of weights or gradients."""
        return _TENSORS if tensor.device.type == self.device.type else _HOST

    @contextmanager
    def _moving(self, what: str, flat: torch.Tensor) -> Iterator[None]:
        stopwatch = self.lanes.stopwatch()
        yield
        stopwatch.stop(partial(self._recorder.moved, Link.COLLECTIVES, what, flat.nbytes))

    @contextmanager
    def _in_line(self) -> Iterator[None]:
        """Enclose a collective for which the current stream waits, also if the enclosed code raises.

        The lanes need not keep its tensors, because what is freed after that wait is used again only behind it.
        """
        try:
            with self.lanes.communicating():
                yield
        finally:
            self.lanes.rejoin()

    def gather_unit(self, flat: torch.Tensor, partition: torch.Tensor, what: str) -> None:
        """Gather a unit that all ranks have confirmed (see lockstep.py), within the context of `Lanes.gathering`.

        The arguments are those of `all_gather_flat`, and what that context returns.
        """
        if self.world_size > 1:
            with self._moving(what, flat):
                self._run(what, _UNITS, _all_gather, flat, partition)
        elif partition is not flat:
            flat.copy_(partition)

    def all_gather_flat(self, flat: torch.Tensor, partition: torch.Tensor, what: str = "a gather of weights") -> None:
        """Fill `flat` [world * n] with every rank's `partition` [n], on any device; return when that may be reused."""
        if self.world_size == 1:
            flat.copy_(partition)
            return
        with self._in_line(), self._moving(what, flat):
            self._run(what, self._index_for(flat), _all_gather, flat, partition.to(flat.device))

    def reduce_scatter(
        self, partition: torch.Tensor, flat: torch.Tensor, what: str = "a reduction of gradients", *, mean: bool = True
    ) -> None:
        """Set `partition` [n] to this rank's part of the mean over ranks of `flat` [world * n], which is overwritten.

        On an accelerator, call `Lanes.rejoin` before other work than collectives uses the result.

        The division comes before the addition, as in DDP, because a sum of many fp16 gradients would overflow.

        Args:
            mean: False: `partition` is of the sum, which is not divided.
        """
        with self.lanes.communicating(partition, flat), self._moving(what, flat):
            summed, index = flat.div_(self.world_size) if mean else flat, self._index_for(flat)
            if self._is_on_host(index):
                # This is what gloo's reduce_scatter does with a copy. Its wait ignores the time-out that it is given,
                # so a rank in it would not look whether another one has gone.
                self._run(what, index, dist.all_reduce, summed)
                partition.copy_(summed.chunk(self.world_size)[self.rank])
            else:
                self._run(what, index, _reduce_scatter, partition, summed)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Overwrite every rank's `tensor` with that of rank `source`."""
        if self.world_size > 1:
            with self._in_line():
                self._run("a broadcast", self._index_for(tensor), dist.broadcast, tensor, src=source)

    def gather_rows(self, row: torch.Tensor, what: str = "an exchange") -> torch.Tensor:
        """Return the `row` [n] of every rank, as [world, n] on the CPU."""
        row = row.cpu()
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = torch.empty(self.world_size * row.numel(), dtype=row.dtype)
        self._run(what, _HOST, _all_gather, rows, row)
        return rows.view(self.world_size, -1)

    def start_gather_headers(self, header: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a `header` [n] of every rank. It does not wait.

        All headers are CPU tensors of the same size n. It needs a world size above 1.
        """
        self._require_part()
        rows = torch.empty(self.world_size, header.numel(), dtype=header.dtype)
        begun = time.monotonic()
        work = _all_gather(rows.view(-1), header, group=self._groups[_CONTROL], async_op=True)
        return PendingRows(self, work, rows, what, begun)

    def start_exchange(self, row: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a `row` [n] of integers of every rank. It does not wait.

        All rows are CPU tensors of the same size n. It needs a world size above 1.
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
        tensor = torch.tensor(flags, dtype=torch.uint8)
        self._run(what, _HOST, dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in tensor.tolist()]

    def gather_ids(self, identity: bytes, what: str = "an exchange") -> list[bytes]:
        """Return every rank's `identity`; all have the same length."""
        rows = self.gather_rows(torch.tensor(list(identity), dtype=torch.uint8), what)
        return [bytes(row) for row in rows.tolist()]

    def gather_bytes(self, content: bytes, what: str = "an exchange") -> list[bytes]:
        """Return every rank's `content`; lengths may differ."""
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
