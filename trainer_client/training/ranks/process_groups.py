"""The process groups of a training run, on torch.distributed, and this rank's part in them.

This module owns the engine's process groups from their making to their end, and what this rank knows of other ranks
that have gone. It must never decide what is communicated, which collectives.py does, nor let a thread wait until the
time-out for a rank that is known to have gone.
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
from trainer_client.base.recorder import Cause, Recorder
from trainer_client.comm import environment_default, lazily_connected
from trainer_client.errors import CollectiveError, CollectiveTimeoutError
from trainer_client.training.ranks.pulse import Pulse, host_of
from trainer_client.training.ranks.watch import Watch

# Indexes of the process groups; see [Note: process groups].
HOST, CONTROL, UNITS, TENSORS = range(4)

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
    on_host = (HOST, CONTROL, UNITS, TENSORS) if device.type == CPU else (HOST, CONTROL)
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


class ProcessGroups:
    """The process groups of one rank: it makes and leaves them, waits in them, and learns that another rank has gone.

    A wait for other ranks raises CollectiveError if they do not take part, and its subclass CollectiveTimeoutError
    after the time-out. After such an error this rank cannot communicate any more. At world size 1 there is no process
    group.

    Args:
        device: where this rank computes.
        timeout_seconds: how long a rank waits for the others in one collective.
        recorder: records waits for other ranks.

    [Note: process groups] Two ranks at different points of the program must not join the same collective: gloo ends
    the process if the sizes of their tensors differ, and mixes the bytes if the sizes are equal. Several process groups
    prevent that:

    - UNITS has only the gathers of units, because a rank may begin one while another rank is elsewhere;
    - TENSORS has the other collectives of weights and gradients. Between them all ranks make agreements (`any_rank`),
      in which a rank that is ahead waits for the others;
    - CONTROL has the exchanges that precede gathers of units and reductions. Headers of gathers are exchanged by
      another kind of collective than orders of reductions, so gloo cannot take one for the other;
    - HOST has the exchanges of small values between the hosts: flags, norms, names.

    A job on several nodes has one group more, for `lowest_beside`. A thread beside the training uses it, and goes on
    while the training is in the next step or waits.

    CONTROL and HOST are gloo groups, and use CPU tensors also if the ranks compute on accelerators. If flags went
    through the device, each exchange of flags would wait until the device has done all its work, and ranks could wait
    for each other in two groups at once.

    [Note: one communicator] On an accelerator, UNITS and TENSORS are one group with one communicator, which is not the
    script's own group. NCCL promises no progress for two communicators on one device unless all ranks use them in the
    same order. With one communicator, the calls of all ranks have the same order, because lockstep.py orders the
    gathers and step/reduction_order.py the reductions. See tests/integration/test_ranks_gone.py.
    """

    def __init__(self, device: torch.device, timeout_seconds: float, recorder: Recorder) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._recorder = recorder
        self._groups: list[dist.ProcessGroup] = []
        # The process group for `lowest_beside`, in a list; empty before `open_beside`.
        self._beside: list[dist.ProcessGroup] = []
        self._watch: Watch | None = None
        self._pulse: Pulse | None = None
        # The host of rank 0, for the pulse; None if it is not known.
        self._host: str | None = None
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
            store: Any = self._groups[HOST].get_group_store()
            store = store.clone()
            self._watch = Watch(store, self.rank, self.world_size, timeout_seconds)
            self._host = host_of(store)

    def start_pulse(self, gather: Callable[[bytes], Sequence[bytes]]) -> None:
        """Begin to exchange datagrams with some other ranks, which find out whether a rank is silent; see pulse.py.

        All ranks must call this, once. The world size must be above 1.

        Args:
            gather: a collective that returns the contents that all ranks have given it, in the order of the ranks.
        """
        self._pulse = Pulse(self.rank, gather, self._host, partial(self.rank_has_gone, is_closed=False))

    def close(self) -> None:
        """Leave the process groups; idempotent."""
        if self._watch is not None:
            self._watch.close()
        if self._pulse is not None:
            self._pulse.close()
        groups, self._groups = self._groups, []
        if self._has_failed:
            self._end_beside_this(groups, abort=self._device.type != CPU)
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
        self._end_beside_this(groups, abort=self._device.type != CPU, first=partial(self._tell, self._watch, news))
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
        if self._device.type != CPU:
            aborting = threading.Timer(patience, self._abort_communicator)
            aborting.daemon = True
            aborting.start()

    def _abort_communicator(self) -> None:
        """Abort the collectives that the device has under way.

        The training thread may wait in torch for the device, for example in a copy of a gradient, and only the abort
        ends that wait. The copied values are then wrong. But no step is made with them, because a step needs an
        agreement of all ranks, and a commit needs the votes of all ranks.
        """
        for group in self._groups[TENSORS:]:
            # torch raises RuntimeError if another thread has ended this process group meanwhile.
            with suppress(RuntimeError):
                group.abort()

    def _check_others(self) -> None:
        """Raise _RankGoneError if the daemon or the pulse has said that another rank has gone."""
        if self._gone is not None and time.monotonic() >= self._gone[1]:
            raise _RankGoneError(self._gone[0])

    def require_part(self) -> None:
        """Raise CollectiveError if this rank has called `abandon`, and so can join no collective."""
        if self._abandoned is not None:
            raise CollectiveError(
                f"this rank cannot join collectives any more, because it has failed in {self._abandoned}: restart the "
                "job, it resumes from the last commit"
            )

    def group(self, index: int) -> dist.ProcessGroup:
        """Return the process group with this index, for a collective that is begun at once."""
        return self._groups[index]

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
        self.require_part()
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
            self.require_part()
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
