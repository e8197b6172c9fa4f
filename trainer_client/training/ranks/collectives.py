"""The collectives of a training run, on torch.distributed.

This module owns the engine's process groups. At world size 1 there is no process group, and nothing is communicated.
All ranks must make the same calls in the same order, so a caller may decide *whether* to communicate only from values
that are the same on all ranks.
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

# torch 2.13 has new names for all_gather_into_tensor and reduce_scatter_tensor, and warns if the old names are used.
# Older versions have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Indexes of the process groups; see [Note: process groups].
_HOST, _CONTROL, _UNITS, _TENSORS = range(4)

# The most characters of a rank's error that other ranks show.
_SHOWN_CHARACTERS = 300

# `close` waits so long for the process groups of a rank that has abandoned the run to end.
_END_SECONDS = 10.0
# A rank that waits in a collective checks this often whether another rank has gone.
_LOOK = timedelta(seconds=0.5)
# This rank checks repeatedly whether a device has come to an event: the first and the longest pause between checks.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 20e-6, 1e-3
# A rank that has closed its session begins no collective any more, but bytes that it has sent before may still be on
# their way. So the other ranks wait for their collectives so long before they take the rank for gone.
_UNDER_WAY_SECONDS = 5.0
# This environment variable says what NCCL's watchdog does at an error or a time-out. By default it ends the process by
# SIGABRT, and no message says in which collective each rank was. With 0 it does nothing, and the waits of this module
# raise an error with the ranks' places.
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
    """End the groups, and empty the list.

    Dropping the last reference to a group may wait for long. So the caller keeps no reference, and this function, which
    runs on a thread of its own, drops the last one.

    Args:
        abort: whether to abort the collectives under way first, because a device would wait without end for the other
            ranks in them. gloo cannot abort: its collectives end when the connection to another rank ends.
    """
    while groups:
        # The script may have ended torch.distributed meanwhile, and a group may be in the list twice. In both cases the
        # group has ended already, so torch's error is ignored.
        with suppress(RuntimeError, ValueError):
            if abort:
                groups[0].abort()
            dist.destroy_process_group(groups[0])
        del groups[0]


class _RankGoneError(RuntimeError):
    """Raised to end a wait for a collective, because another rank has gone and the collective cannot end."""


class PendingRows:
    """An exchange under way, in which every rank gives a tensor [n], its row; `wait` returns all rows [world, n].

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
        """Wait until every rank has given its row, and return the rows [world, n]. It can raise CollectiveError."""
        with self._collectives.within(self._what, self._begun):
            self._collectives.wait_for(self._work)
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

    [Note: process groups] Two ranks at different points of the program must not join the same collective: gloo ends
    the process if the sizes of their tensors differ, and mixes the bytes if the sizes are equal. Several process groups
    prevent that:

    - _UNITS has only the gathers of units, because a rank may begin one while another rank is elsewhere;
    - _TENSORS has the other collectives of weights and gradients. Between them all ranks make agreements (`any_rank`),
      in which a rank that is ahead waits for the others;
    - _CONTROL has the exchanges that precede gathers of units and reductions. Headers of gathers are exchanged by
      another kind of collective than orders of reductions, so gloo cannot take one for the other;
    - _HOST has the exchanges of small values between the hosts: flags, norms, names.

    A job on several nodes has one group more, for `lowest_beside`. A thread beside the training uses it, and goes on
    while the training is in the next step or waits.

    _CONTROL and _HOST are gloo groups, and use CPU tensors also if the ranks compute on accelerators. If flags went
    through the device, each exchange of flags would wait until the device has done all its work, and ranks could wait
    for each other in two groups at once.

    [Note: one communicator] On an accelerator, _UNITS and _TENSORS are one group with one communicator, which is not
    the script's own group. NCCL promises no progress for two communicators on one device unless all ranks use them in
    the same order. With one communicator, the calls of all ranks have the same order, because lockstep.py orders the
    gathers and step/reduction_order.py the reductions. See tests/integration/test_ranks_gone.py.
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
        # The process group for `lowest_beside`, in a list; empty before `open_beside`.
        self._beside: list[dist.ProcessGroup] = []
        self._watch: Watch | None = None
        self._pulse: Pulse | None = None
        # The threads that destroy process groups whose collectives may be under way; `close` waits for them.
        self._ending: list[threading.Thread] = []
        # Another rank that has gone, as a text for people, and the time of time.monotonic() from which on this rank no
        # longer waits for it.
        self._gone: tuple[str, float] | None = None
        # The collective or call in which this rank has failed, and the error, as text; None if it has not failed.
        self._abandoned: str | None = None
        # Whether a collective of `_groups` has failed. The collective may still be under way, as when another rank is
        # silent, so its group cannot be destroyed at once.
        self._has_failed = False
        if self.world_size > 1:
            self._groups = _make_groups(device, timedelta(seconds=timeout_seconds))
            # The watch gets a clone of the key-value store, which has its own connection, so that the watch and the
            # training never wait for each other.
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
                # torch raises ValueError if the script has called dist.destroy_process_group() before, as torch
                # recommends for the end of a script.
                with suppress(ValueError):
                    dist.destroy_process_group(group)
        self.leave_beside()
        for ending in self._ending:
            # If a process exits while gloo destroys its groups, gloo ends the process by SIGABRT, so this rank waits.
            # The wait is short, because the other ranks abandon the run as well.
            ending.join(_END_SECONDS)

    def abandon(self, what: str, error: BaseException) -> None:
        """Leave the process groups for good, because this rank has failed in `what`, and other ranks may wait for it.

        Ranks that wait for this rank get an error at once instead of after their time-out. Later collectives of this
        rank raise CollectiveError. The call does not wait; a repeated call has no effect. See
        tests/integration/test_failing_ranks.py.
        """
        if self._watch is None or self._abandoned is not None:
            return
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:_SHOWN_CHARACTERS]
        self._abandoned = f"{what} ({why})"
        news = self._watch.abandon(what, why)
        groups, self._groups = self._groups, []
        # When this rank's process groups end, the other ranks read why. So this rank first writes the reason.
        self._end_beside_this(groups, abort=self.device.type != CPU, first=partial(self._tell, self._watch, news))
        self.leave_beside()

    def _tell(self, watch: Watch, news: str) -> None:
        watch.exchange()
        if self._pulse is not None:
            self._pulse.tell(news)

    def _end_beside_this(
        self, groups: list[dist.ProcessGroup], *, abort: bool, first: Callable[[], None] = lambda: None
    ) -> None:
        """Call `first` and then end the groups, on a thread of its own; see `_end`.

        gloo destroys a group only when its pending collectives have ended, and one of them may wait for another rank.
        """

        def end() -> None:
            first()
            _end(groups, abort=abort)

        ending = threading.Thread(target=end, name="paramserver-abandon", daemon=True)
        self._ending.append(ending)
        ending.start()

    def rank_has_gone(self, who: str, is_closed: bool) -> None:
        """Take note that another rank will take part in no collective any more. Any thread may call this.

        Each collective of this rank that waits for the gone rank raises CollectiveError soon, instead of after its
        time-out. The note is needed, because gloo mostly notices that a process has ended, but not that one was
        stopped, and NCCL notices neither. This rank tells the other ranks by the pulse, unless the gone rank has closed
        its engine.

        Args:
            who: the gone rank and the reason, as a text for error messages.
            is_closed: whether the rank has closed its engine, so that the last collective with it may still end.
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
        """Abort the collectives that the device has under way.

        The training thread may wait in torch for the device, for example in a copy of a gradient, and only the abort
        ends that wait. The copied values are then wrong. But no step is made with them, because a step needs an
        agreement of all ranks, and a commit needs the votes of all ranks.
        """
        for group in self._groups[_TENSORS:]:
            # torch raises RuntimeError if another thread has ended this process group meanwhile.
            with suppress(RuntimeError):
                group.abort()

    def _check_others(self) -> None:
        """Raise _RankGoneError if the daemon or the pulse has said that another rank has gone."""
        if self._gone is not None and time.monotonic() >= self._gone[1]:
            raise _RankGoneError(self._gone[0])

    def _require_part(self) -> None:
        """Raise CollectiveError if this rank has called `abandon`, and so can join no collective."""
        if self._abandoned is not None:
            raise CollectiveError(
                f"this rank cannot join collectives any more, because it has failed in {self._abandoned}: restart the "
                "job, it resumes from the last commit"
            )

    @contextmanager
    def within(self, what: str, begun: float | None = None) -> Iterator[None]:
        """Enclose a collective, or the wait for one. A RuntimeError of torch becomes a CollectiveError.

        Args:
            what: name of the collective in messages.
            begun: when the collective was begun, in seconds of time.monotonic(); None: now.
        """
        if self._watch is None:
            yield
            return
        self._require_part()
        begun = time.monotonic() if begun is None else begun
        try:
            with self._watch.within(what), self._recorder.waiting(Cause.RANKS, what):
                yield
        # torch.distributed raises RuntimeError, and no narrower class, if a collective of gloo fails.
        except RuntimeError as error:
            self._has_failed = True
            raise self._failure(what, begun, error) from None

    def _failure(self, what: str, begun: float, error: RuntimeError) -> CollectiveError:
        """Return the error of a collective that was begun at a time of time.monotonic() and has failed."""
        assert self._watch is not None
        # The stack frames in the error of a failed collective refer to its process group, and live as long as the
        # error. They are cleared, so that the thread that ends the groups drops the last reference to the group. gloo
        # may then wait for a lost node, and the training thread would wait 80 s and more
        # (tests/integration/test_silent_nodes.py).
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
        """Wait for a collective of gloo, which has the time-out of its group. Call this within `within`.

        Args:
            work: the collective.
            check: is called again and again, and may raise an error to end the wait.

        Raises:
            RuntimeError: the collective has failed, or another rank has gone.
        """
        while True:
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if work.is_completed():
                    # The collective has ended or failed since its wait timed out. If it has failed, a second `wait`
                    # raises its error.
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

        Each rank has one such thread, and these threads must make the same calls in the same order.

        Args:
            value: this rank's value.
            what: name of the exchange in messages.
            check: is called again and again, and raises an error to end the wait.

        Raises:
            CollectiveError: another rank did not take part.
        """
        if self._watch is None:
            return value
        groups, lowest, begun = self._beside, torch.tensor([value]), time.monotonic()

        def check_part() -> None:
            self._require_part()
            check()

        # `abandon` may have emptied `self._beside` before, or may do so while this thread waits, so both are checked.
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
        """Check that no other rank has gone, for a thread beside the training that does not wait in a collective.

        Args:
            what: name of the thread's wait in messages.
            begun: when that wait was begun, in seconds of time.monotonic().

        Raises:
            CollectiveError: the daemon or the pulse says that another rank has gone.
        """
        try:
            self._check_others()
        except _RankGoneError as error:
            raise self._failure(what, begun, error) from None

    def leave_beside(self) -> None:
        """Leave the process group of `lowest_beside`, so that calls of other ranks that wait for this rank fail.

        The call does not wait; a repeated call has no effect.
        """
        groups, self._beside = self._beside, []
        if groups:
            self._end_beside_this(groups, abort=False)

    def wait_for_event(self, event: torch.Event) -> None:
        """Wait until the device has come to an event. The device may have to end collectives before.

        Raises:
            CollectiveError: the wait takes longer than the time-out, or another rank has gone.
        """
        begun = time.monotonic()
        try:
            self._wait_until(event.query)
        except RuntimeError as error:
            with self.within("a collective of the device", begun):
                raise RuntimeError(str(error)) from None

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done`, which asks the device, is True. RuntimeError if a rank has gone or after the time-out.

        torch raises no error if the device waits for ranks that do not take part, so this method looks for gone ranks
        and for the time-out itself.
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
        """Run a collective in a process group: to its end for CPU tensors; else it is queued on the device's stream."""
        with self.within(what):
            on_host = self._is_on_host(index)
            work = collective(*arguments, group=self._groups[index], async_op=on_host, **options)
            if work is not None:
                self.wait_for(work)

    def _is_on_host(self, index: int) -> bool:
        """Return whether the process group with this index is one of gloo, which moves bytes of host memory."""
        return index in (_HOST, _CONTROL) or self.device.type == CPU

    def _index_for(self, tensor: torch.Tensor) -> int:
        """Return the index of the process group for a collective of weights or gradients in `tensor`."""
        return _TENSORS if tensor.device.type == self.device.type else _HOST

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
                self._run(what, _UNITS, _all_gather, flat, partition)
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
        self._run(what, _HOST, _all_gather, rows, row)
        return rows.view(self.world_size, -1)

    def start_gather_headers(self, header: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a `header` [n] of every rank, and return at once.

        All headers are CPU tensors of the same size n. The world size must be above 1.
        """
        self._require_part()
        rows = torch.empty(self.world_size, header.numel(), dtype=header.dtype)
        begun = time.monotonic()
        work = _all_gather(rows.view(-1), header, group=self._groups[_CONTROL], async_op=True)
        return PendingRows(self, work, rows, what, begun)

    def start_exchange(self, row: torch.Tensor, what: str) -> PendingRows:
        """Begin to gather a tensor `row` [n] of integers of every rank, and return at once.

        All rows are CPU tensors of the same size n. The world size must be above 1.
        """
        self._require_part()
        rows = torch.zeros(self.world_size, row.numel(), dtype=row.dtype)
        rows[self.rank] = row
        begun = time.monotonic()
        work = dist.all_reduce(rows, group=self._groups[_CONTROL], async_op=True)
        return PendingRows(self, work, rows, what, begun)

    def any_rank(self, flags: Sequence[bool], what: str = "an agreement") -> list[bool]:
        """Return for each flag whether any rank has set it. All ranks must call this with as many flags."""
        if self.world_size == 1 or not flags:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.uint8)
        self._run(what, _HOST, dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
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
