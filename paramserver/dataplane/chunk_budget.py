"""The byte budget for chunks in the daemon: shared fairly between transfers, and taken from those that stall.

A transfer is one Read or Write. It reserves bytes of the budget before the daemon reads a chunk from the store or
grants a writer credit, and releases them when the chunk has been sent or written into its lease. The budget has two
halves. A transfer begins in the first half with small chunks. When its client has shown that it takes or sends bytes,
the transfer moves to the second half with large chunks; a stall moves it back. So clients that open transfers and leave
them idle take nothing from the transfers that move.

A transfer that has not moved for STALLED_SECONDS is ended as soon as another transfer waits for room; the longest
stalled one is ended first. A transfer that has not moved for the stall time-out is ended in any case. The bytes of an
ended read that gRPC still holds remain part of the used budget until the call is over, because a server cannot take
them back from gRPC. If the client does not read, the call is over when its deadline passes or its connection ends.
Until then all other chunks are smaller, so that the other transfers still move. This module owns no bytes and no
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paramserver.contract.chunks import MAX_CHUNK_BYTES
from paramserver.errors import TransferStalledError
from paramserver.rpc.urgency import Urgency
from storage.base.errors import NotFoundError, StorageError
from storage.base.fair_queue import FairQueue, Share

STALLED_SECONDS = 0.1
_TICK_SECONDS = STALLED_SECONDS / 2
# The size of the first chunks of each transfer. gRPC's flow-control windows take some of them at once, and two thousand
# fit into one half of the default budget. Chunks grow by the factor _GROWTH as long as each of them moves in less than
# STALLED_SECONDS.
FIRST_CHUNK_BYTES = 16 << 10
_GROWTH = 8
# A chunk takes at most 1 / _LARGEST_SHARE of the half of the budget that its transfer uses. For this rule, the bytes
# that gRPC still holds for ended transfers are subtracted from the half.
_LARGEST_SHARE = 32


@dataclass(slots=True, eq=False)
class Transfer:
    """One stream of Read, Write or AccessLoan under way, with the bytes of the budget that it holds.

    `ended` gets an exception when the transfer must stop, so the stream's handler awaits it.
    """

    session_id: str
    job: str
    urgency: Urgency
    ended: asyncio.Future[None]
    moved_at: float
    # True once the client has granted further credit (Read) or sent a chunk (Write). From then on a Write gets more
    # credit than its first chunk, and the chunks of the transfer may grow.
    is_proven: bool = False
    chunk_bytes: int = FIRST_CHUNK_BYTES
    held_bytes: int = 0

    def end(self, error: StorageError) -> None:
        """Make the handler of this transfer fail with `error`."""
        if not self.ended.done():
            self.ended.set_exception(error)


@dataclass(slots=True, eq=False)
class _Waiter:
    transfer: Transfer
    nbytes: int
    granted: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Half:
    """The half of the budget for new transfers, or the half for transfers that have moved bytes.

    Its `holders` are the transfers that hold bytes of it, the one that has not moved for longest first.
    """

    limit_bytes: int
    used_bytes: int = 0
    # The part of `used_bytes` that belongs to ended transfers. gRPC still holds these bytes, so they cannot be granted.
    pinned_bytes: int = 0
    holders: dict[Transfer, None] = field(default_factory=dict)
    queues: tuple[FairQueue[_Waiter], ...] = field(default_factory=lambda: tuple(FairQueue() for _ in Urgency))
    waiting_bytes: int = 0

    @property
    def next_queue(self) -> FairQueue[_Waiter] | None:
        return next((queue for queue in self.queues if queue), None)


class ChunkBudget:
    """The byte budget that all transfers under way in the daemon share.

    The handlers of Read, Write and AccessLoan reserve room for each chunk here, and wait while there is none.
    """

    def __init__(
        self, budget_bytes: int, *, stall_seconds: float, weight_of: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        """Make a budget that no transfer uses yet.

        Args:
            budget_bytes: the size of the whole budget, half of it for transfers that have not yet shown that they move
                bytes, and half for those that have; the configuration's key `stream_budget`.
            stall_seconds: a transfer that moves no byte for so long is ended; the configuration's key
                `stream_stall_seconds`.
            weight_of: returns the weight of a job. Among waiting transfers, a job with twice the weight gets room for
                twice the bytes.
        """
        self.budget_bytes = budget_bytes
        self._stall_seconds = stall_seconds
        self._weight_of = weight_of
        self._unproven = _Half(budget_bytes // 2)
        self._proven = _Half(budget_bytes // 2)
        self._by_session: dict[str, set[Transfer]] = {}
        self._half_of: dict[Transfer, _Half] = {}
        self._tick: asyncio.TimerHandle | None = None

    @property
    def used_bytes(self) -> int:
        """The bytes of all chunks in the daemon, plus the unused credit of writers."""
        return self._unproven.used_bytes + self._proven.used_bytes

    def count(self, session_id: str) -> int:
        """Return the number of transfers of a session that are under way."""
        return len(self._by_session.get(session_id, ()))

    @contextmanager
    def open(self, session_id: str, job: str, urgency: Urgency) -> Iterator[Transfer]:
        """Yield a transfer that lasts until the block ends; the bytes that it holds then are released."""
        loop = asyncio.get_running_loop()
        transfer = Transfer(session_id, job, urgency, loop.create_future(), loop.time())
        members = self._by_session.setdefault(session_id, set())
        members.add(transfer)
        try:
            yield transfer
        finally:
            members.remove(transfer)
            if not members:
                del self._by_session[session_id]
            self._release(transfer, transfer.held_bytes)
            transfer.ended.cancel()

    def end_session(self, session_id: str) -> None:
        """End all transfers of a session that has ended."""
        for transfer in self._by_session.get(session_id, ()):
            transfer.end(NotFoundError("the session ended while its bytes were streamed; open a new one"))

    async def reserve(self, transfer: Transfer, nbytes: int) -> None:
        """Wait until it is the transfer's turn and there is room, then reserve `nbytes`."""
        if self.try_reserve(transfer, nbytes):
            return
        half = self._half(transfer)
        waiter = _Waiter(transfer, nbytes, asyncio.get_running_loop().create_future())
        queue = half.queues[transfer.urgency]
        queue.push(waiter, (Share(transfer.job, self._weight_of(transfer.job)), Share(transfer.session_id)))
        half.waiting_bytes += nbytes
        self._keep_ticking()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in queue:
                queue.remove(waiter)
                half.waiting_bytes -= nbytes
                self._serve(half)
            # If the waiting transfer is not in the queue any more, it got its room shortly before this cancellation.
            # That room is released at the end of the transfer's block `open`.
            raise

    def try_reserve(self, transfer: Transfer, nbytes: int) -> bool:
        """Reserve `nbytes` and return True if there is room and no transfer of at least the same urgency waits for it.

        Otherwise return False.
        """
        half = self._half(transfer)
        if any(half.queues[: transfer.urgency + 1]) or half.used_bytes + nbytes > half.limit_bytes:
            return False
        self._take(half, transfer, nbytes)
        return True

    def can_fit(self, transfer: Transfer, nbytes: int) -> bool:
        """Return whether there is room for `nbytes` once all transfers that have not ended give up their bytes."""
        half = self._half(transfer)
        return nbytes <= half.limit_bytes - half.pinned_bytes

    def chunk_bytes(self, transfer: Transfer) -> int:
        """Return the size of the largest chunk for which the transfer may reserve room now."""
        half = self._half(transfer)
        return min(
            transfer.chunk_bytes, max(FIRST_CHUNK_BYTES, (half.limit_bytes - half.pinned_bytes) // _LARGEST_SHARE)
        )

    def moved(self, transfer: Transfer, nbytes: int) -> None:
        """Release `nbytes` of the transfer's room, because that many bytes were sent or written into their lease."""
        now = asyncio.get_running_loop().time()
        quickly = now - transfer.moved_at < STALLED_SECONDS
        if transfer.is_proven and quickly:
            transfer.chunk_bytes = min(MAX_CHUNK_BYTES, transfer.chunk_bytes * _GROWTH)
        else:
            transfer.chunk_bytes = FIRST_CHUNK_BYTES
        transfer.moved_at = now
        self._release(transfer, nbytes)

    @contextmanager
    def pinned(self, transfer: Transfer, nbytes: int) -> Iterator[None]:
        """Keep `nbytes` of a failed transfer reserved until the block ends, and release its other bytes now."""
        self._release(transfer, transfer.held_bytes - nbytes)
        half = self._half(transfer)
        half.pinned_bytes += nbytes
        try:
            yield
        finally:
            half.pinned_bytes -= nbytes
            self._release(transfer, nbytes)

    def _half(self, transfer: Transfer) -> _Half:
        """Return the half in which the transfer reserves its next bytes: the present one while it holds bytes."""
        moves = transfer.chunk_bytes > FIRST_CHUNK_BYTES
        return self._half_of.get(transfer) or (self._proven if moves else self._unproven)

    def _take(self, half: _Half, transfer: Transfer, nbytes: int) -> None:
        if not transfer.held_bytes:
            transfer.moved_at = asyncio.get_running_loop().time()
            self._half_of[transfer] = half
            half.holders[transfer] = None
            self._keep_ticking()
        half.used_bytes += nbytes
        transfer.held_bytes += nbytes

    def _release(self, transfer: Transfer, nbytes: int) -> None:
        if not nbytes:
            return
        half = self._half_of[transfer]
        half.used_bytes -= nbytes
        transfer.held_bytes -= nbytes
        del half.holders[transfer]
        if transfer.held_bytes:
            half.holders[transfer] = None
        else:
            del self._half_of[transfer]
        self._serve(half)

    def _serve(self, half: _Half) -> None:
        while (queue := half.next_queue) is not None:
            waiter = queue.peek()
            assert waiter is not None
            if half.used_bytes + waiter.nbytes > half.limit_bytes:
                return
            queue.take(waiter, waiter.nbytes)
            half.waiting_bytes -= waiter.nbytes
            if not waiter.granted.cancelled():
                self._take(half, waiter.transfer, waiter.nbytes)
                waiter.granted.set_result(None)

    # The following methods end transfers whose clients have not moved bytes for a while, so that waiting ones get their
    # room.

    def _keep_ticking(self) -> None:
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._look_for_stalled)

    def _look_for_stalled(self) -> None:
        self._tick = None
        now = asyncio.get_running_loop().time()
        for half in (self._unproven, self._proven):
            self._end_stalled(half, now)
            if half.holders or half.waiting_bytes:
                self._keep_ticking()

    def _end_stalled(self, half: _Half, now: float) -> None:
        missing = half.used_bytes + half.waiting_bytes - half.limit_bytes
        for transfer in half.holders:
            if transfer.ended.done():
                continue
            still = now - transfer.moved_at
            if still < STALLED_SECONDS or (missing <= 0 and still < self._stall_seconds):
                return
            transfer.end(
                TransferStalledError(
                    f"the transfer was ended: {transfer.held_bytes} bytes have not moved for {still:.1f} s (allowed: "
                    f"{STALLED_SECONDS:g} s while other transfers wait for room, else stream_stall_seconds, "
                    f"{self._stall_seconds:g}); go on with a new one from the byte that you have"
                )
            )
            missing -= transfer.held_bytes
