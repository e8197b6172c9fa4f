"""The contract of lanes, and the lanes of a rank that computes on the CPU, where nothing runs beside anything.

This module owns no thread and no memory. It must never know what the bytes are, nor who granted them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from trainer_client.base.recorder import HostStopwatch, Stopwatch

Act = Callable[[], None]

# The slices of host memory that are copied one by one: all of it at once.
WHOLE = (slice(None),)


class PendingCopy(Protocol):
    """The future of copies from the device to host memory."""

    @property
    def is_done(self) -> bool:
        """Whether the bytes are in host memory. It does not wait."""

    def wait(self) -> None:
        """Wait until the bytes are in host memory."""


class CopyAhead(Protocol):
    """Bytes of host memory on their way to the device, before it is known where they are used."""

    @property
    def is_done(self) -> bool:
        """Whether the bytes have left host memory. It does not wait."""

    def wait(self) -> None:
        """Wait until the bytes have left host memory. Call `land` or `drop` before."""

    def land(self, target: torch.Tensor) -> None:
        """Fill `target` [n], uint8, on the device with the bytes. It does not wait; call it once at most."""

    def drop(self) -> None:
        """Give up the bytes, instead of `land`."""


class CopiesBeside(Protocol):
    """Copies from the device to host memory that another thread begins, while the caller's thread goes on."""

    def copying(self, check: Act) -> AbstractContextManager[None]:
        """Enclose copies that may be begun without waiting for each; the end of the context waits for all of them.

        `check` is called again and again during that wait, and raises an exception if the wait is to end without them.
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
            source: as many bytes, uint8, which stay valid and unchanged until `after_copies_in` says so.
            pieces: the slices of `source` that are copied one by one; see LeasedBytes.pieces.
        """

    def copy_ahead(self, source: torch.Tensor, pieces: Iterable[slice] = WHOLE) -> CopyAhead:
        """Begin to copy bytes of host memory to the device, beside what the device computes until `CopyAhead.land`.

        Args:
            source: the bytes, uint8, which stay valid and unchanged until `CopyAhead.is_done` says so.
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

        `copy_out` within the context takes its values from there. Elsewhere, call `rejoin` before the first use.
        """

    def rejoin(self) -> None:
        """Have the current stream wait for all that was enclosed by `communicating` so far."""

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

        What is copied must not be written until the copies are done. Only one thread at a time may copy so.
        """

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host [numel] that `copy_out` can write to without waiting."""

    def wait_with(self, wait: Callable[[torch.Event], None]) -> None:
        """Have the host wait for events by this function from now on, which raises if they never come."""

    def stopwatch(self) -> Stopwatch:
        """Begin to measure the work that the current stream is given; in a later call of `poll`, the result is there.

        The first call may wait for the device.
        """

    def report_copies_in(self, report: Callable[[int, float, float], None]) -> None:
        """Have `report` called with bytes, begin and end of each copy to the device, in a later call of `poll`.

        Copies within host memory are not reported, because they are done when the call that makes them returns.
        """

    def poll(self) -> None:
        """Make the calls that `after_copies_in` and `copy_out` owe by now. Waits only if too many are owed."""

    def finish_copies_in(self) -> None:
        """Wait for all copies into the device, and make the calls that `after_copies_in` owes."""

    def finish(self) -> None:
        """Wait for all copies, and make all calls that are owed."""

    def close(self) -> None:
        """Wait until no copy reads or writes host memory, without the calls that are owed. It raises nothing."""


class _Done:
    """The future of copies that were done at once."""

    is_done = True

    def wait(self) -> None:
        """Do nothing."""


_DONE = _Done()


class _CopyOnLanding:
    """Bytes that are copied when it is known where to."""

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
    """Copies that are done when they are begun."""

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
        """Do nothing."""

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
        """Do nothing."""

    finish_copies_in = finish = close = poll
