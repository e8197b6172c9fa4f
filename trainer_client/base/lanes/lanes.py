"""The contract of lanes, and the lanes of a rank that computes on the CPU, where each copy is done at once.

This module owns no thread and no memory. It must never depend on what the copied bytes are, nor on who has leased them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from trainer_client.base.recorder import HostStopwatch, Stopwatch

Act = Callable[[], None]

# The default for the slices of host memory that are copied: one slice, which is all of the memory.
WHOLE = (slice(None),)


class PendingCopy(Protocol):
    """The future of copies from the device to host memory, which `Lanes.copy_out` has begun."""

    @property
    def is_done(self) -> bool:
        """Whether the bytes are in host memory. It does not wait."""

    def wait(self) -> None:
        """Wait until the bytes are in host memory."""


class CopyAhead(Protocol):
    """A copy of bytes from host memory to the device, begun by `Lanes.copy_ahead` without a target.

    The caller gives the target later with `land`, or gives the bytes up with `drop`.
    """

    @property
    def is_done(self) -> bool:
        """Whether the bytes are copied, so that their host memory may be freed or changed. It does not wait."""

    def wait(self) -> None:
        """Wait until the bytes are copied, so that their host memory may be freed or changed.

        Call `land` or `drop` first, because on a CPU the bytes are copied only when their target is known.
        """

    def land(self, target: torch.Tensor) -> None:
        """Give the bytes their target: fill `target` [n], uint8, on the device. It does not wait; call it once."""

    def drop(self) -> None:
        """Give up the bytes, because no tensor needs them. Call this instead of `land`."""


class CopiesBeside(Protocol):
    """The means, returned by `Lanes.beside`, with which another thread copies from the device to host memory."""

    def copying(self, check: Act) -> AbstractContextManager[None]:
        """Enclose copies that may be begun without waiting for each; the end of the context waits for all of them.

        `check` is called again and again during that wait, and raises an exception to end the wait before the copies
        are done.
        """


class Lanes(Protocol):
    """The contract of the lanes between one rank's host memory and its device; see device_lanes.py [Note: lanes].

    Tensors that the caller passes or gets belong to the current stream of the device, unless they are in host memory.
    No method waits for the device, if it does not say so.
    """

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, pieces: Iterable[slice] = WHOLE) -> None:
        """Begin to fill `target` [n] on the device with the bytes of `source` in host memory.

        Args:
            target: the tensor to fill.
            source: the bytes, uint8, as many as `target` has. They must stay valid and unchanged until the call that
                `after_copies_in` was given is made.
            pieces: the slices of `source` that are copied one by one; see LeasedBytes.pieces.
        """

    def copy_ahead(self, source: torch.Tensor, pieces: Iterable[slice] = WHOLE) -> CopyAhead:
        """Begin to copy bytes of host memory to the device, beside what the device computes until `CopyAhead.land`.

        Args:
            source: the bytes, uint8, which must stay valid and unchanged until `CopyAhead.is_done` is True.
            pieces: the slices of `source` that are copied one by one; see LeasedBytes.pieces.
        """

    def gathering(
        self, flat: torch.Tensor, first: int, last: int, source: torch.Tensor, pieces: Iterable[slice] = WHOLE
    ) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]:
        """Enclose the collective that gathers `flat` [numel] from the partitions of all ranks.

        Args:
            flat: the tensor to fill, on the device.
            first, last: this rank's partition is the elements [first, last) of `flat`.
            source: this rank's partition: a tensor on the device, or bytes as in `copy_in`.
            pieces: the slices of bytes in host memory that are copied one by one.

        Returns:
            A context with the arguments of the all-gather: the whole tensor, and this rank's partition.
        """

    def after_copies_in(self, act: Act) -> None:
        """Call `act` when all copies of `copy_in` and `gathering` so far are done: at once, or in a later call."""

    def communicating(self, *used: torch.Tensor) -> AbstractContextManager[None]:
        """Enclose a collective, and what is computed from its result; `used` are the tensors that it reads and writes.

        Within the context, `copy_out` reads results of the collective. Elsewhere, call `rejoin` before the first use of
        a result.
        """

    def rejoin(self) -> None:
        """Let the current stream's later work begin only when the collectives in `communicating` so far are done."""

    def copy_out(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act | None = None) -> PendingCopy:
        """Begin to copy tensors of the device into host memory.

        Args:
            copies: pairs (target in host memory, values on the device) of the same dtype and shape, each of which is
                copied at once. The values must not be written any more; their memory is kept as long as it is read.
            act: called when the copies are done: at once, or in a later call.
        """

    def after_copies(self, act: Act) -> None:
        """Call `act` when all copies begun so far are done, in both directions: at once, or in a later call."""

    def beside(self) -> CopiesBeside:
        """Return the means to copy from the device on another thread, behind all that the current stream was given.

        What is copied must not be written until the copies are done. Only one thread at a time may make such copies.
        """

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host [numel] that `copy_out` can write to without waiting."""

    def wait_with(self, wait: Callable[[torch.Event], None]) -> None:
        """Use `wait` from now on where the host waits for an event of the device.

        `wait` returns when the event is complete, and raises an error if the event never completes.
        """

    def stopwatch(self) -> Stopwatch:
        """Begin to measure the work that the current stream is given; a later call of `poll` reports the result.

        The first call may wait for the device.
        """

    def report_copies_in(self, report: Callable[[int, float, float], None]) -> None:
        """Have `report` called with bytes, begin and end of each copy to the device, in a later call of `poll`.

        Copies within host memory are not reported, because they are done when the call that makes them returns.
        """

    def poll(self) -> None:
        """Make the calls that `after_copies_in` and `copy_out` were given and whose copies are done.

        This waits for copies only if too many calls are pending.
        """

    def finish_copies_in(self) -> None:
        """Wait for all copies to the device, and make the calls that `after_copies_in` was given."""

    def finish(self) -> None:
        """Wait for all copies in both directions, and make all calls that were to follow them."""

    def close(self) -> None:
        """Wait until no copy reads or writes host memory. It raises nothing.

        Calls that were to follow a copy are not made any more.
        """


class _Done:
    """The PendingCopy that HostLanes returns: its copies were done when `copy_out` returned."""

    is_done = True

    def wait(self) -> None:
        """Do nothing, because the copies are done."""


_DONE = _Done()


class _CopyOnLanding:
    """The CopyAhead that HostLanes returns. `land` copies the bytes, because their target is not known before."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source: torch.Tensor | None = source

    @property
    def is_done(self) -> bool:
        return self._source is None

    def wait(self) -> None:
        """Do nothing, because `land` has copied the bytes."""

    def land(self, target: torch.Tensor) -> None:
        assert self._source is not None, "land or drop was called already"
        target.copy_(self._source)
        self._source = None

    def drop(self) -> None:
        self._source = None


class _CopiesAtOnce:
    """The CopiesBeside that HostLanes returns: each copy is done when the call that makes it returns."""

    @contextmanager
    def copying(self, check: Act) -> Iterator[None]:
        yield


_AT_ONCE = _CopiesAtOnce()


class HostLanes:
    """The lanes of a rank on the CPU: each copy is done at once, and each call is made at once."""

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, pieces: Iterable[slice] = WHOLE) -> None:
        target.copy_(source.view(target.dtype))

    def copy_ahead(self, source: torch.Tensor, pieces: Iterable[slice] = WHOLE) -> CopyAhead:
        return _CopyOnLanding(source)

    @contextmanager
    def gathering(
        self, flat: torch.Tensor, first: int, last: int, source: torch.Tensor, pieces: Iterable[slice] = WHOLE
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield flat, source.view(flat.dtype)

    def after_copies_in(self, act: Act) -> None:
        act()

    @contextmanager
    def communicating(self, *used: torch.Tensor) -> Iterator[None]:
        yield

    def rejoin(self) -> None:
        """Do nothing, because a collective is done when its call returns."""

    def copy_out(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], act: Act | None = None) -> PendingCopy:
        for target, values in copies:
            target.copy_(values)
        if act is not None:
            act()
        return _DONE

    after_copies = after_copies_in

    def beside(self) -> CopiesBeside:
        return _AT_ONCE

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def wait_with(self, wait: Callable[[torch.Event], None]) -> None:
        """Do nothing, because there are no events."""

    def stopwatch(self) -> Stopwatch:
        return HostStopwatch()

    def report_copies_in(self, report: Callable[[int, float, float], None]) -> None:
        """Do nothing, because there is no device."""

    def poll(self) -> None:
        """Do nothing, because every copy is done and no call is owed."""

    finish_copies_in = finish = close = poll
