"""The room that chunks take in the daemon, shared fairly by the transfers under way, and taken from those that stall.

A transfer (one Read or Write) asks for room before a chunk is made, or before its writer gets credit for one, and
gives it back when the chunk has gone where it belongs. The budget has two halves. A transfer begins in one, with
small chunks, and comes into the other one, with whole chunks, when its client has shown that it takes or gives bytes; a
stall sends it back. So clients that open transfers and leave them alone take nothing from those that are moving.

A transfer that has not moved for STALLED_SECONDS keeps its room only until somebody else waits for it: then the longest
stalled are ended first. One that has not moved for the stall time-out is ended in any case. What gRPC holds of a read
that was ended stays in the account until the call is over: a server cannot take back what it has handed to gRPC, and
where the client does not read, that is when its deadline passes or its connection ends. Such bytes make the chunks of
all others smaller, so that they never come to a stand. Owns no bytes and no stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paramserver.contract.chunks import MAX_CHUNK_BYTES
from paramserver.errors import TransferStalledError
from paramserver.rpc.urgency import Urgency
from storage.errors import NotFoundError, StorageError
from storage.fair_queue import FairQueue, Share

STALLED_SECONDS = 0.1
_TICK_SECONDS = STALLED_SECONDS / 2
# A chunk of a client of which nothing is known yet: gRPC's windows take some of them, and two thousand fit into half of
# the default budget. From there, chunks grow as long as each of them moves in less than STALLED_SECONDS.
FIRST_STRIDE_BYTES = 16 << 10
_GROWTH = 8
# Of what is left of a half, the largest chunk.
_LARGEST_SHARE = 32


@dataclass(slots=True, eq=False)
class Transfer:
    """One Read or Write under way. `ended` fails when it must not go on; whoever runs it watches that."""

    session_id: str
    job: str
    urgency: Urgency
    ended: asyncio.Future[None]
    moved_at: float
    # Whether the client has shown that it takes, or gives, bytes.
    is_proven: bool = False
    stride_bytes: int = FIRST_STRIDE_BYTES
    held_bytes: int = 0

    def end(self, error: StorageError) -> None:
        """Lets whoever runs it fail with `error`."""
        if not self.ended.done():
            self.ended.set_exception(error)


@dataclass(slots=True, eq=False)
class _Waiter:
    transfer: Transfer
    nbytes: int
    granted: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Half:
    """One half of the budget; `holders` are in the order in which they moved last."""

    limit_bytes: int
    used_bytes: int = 0
    # Of these, what gRPC holds of transfers that were ended.
    pinned_bytes: int = 0
    holders: dict[Transfer, None] = field(default_factory=dict)
    queues: tuple[FairQueue[_Waiter], ...] = field(default_factory=lambda: tuple(FairQueue() for _ in Urgency))
    waiting_bytes: int = 0

    @property
    def next_queue(self) -> FairQueue[_Waiter] | None:
        return next((queue for queue in self.queues if queue), None)


class Transfers:
    """All transfers of the daemon."""

    def __init__(
        self, budget_bytes: int, *, stall_seconds: float, weight_of: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        """`budget_bytes` is the key `transfer_budget`; `weight_of` returns a job's share of what is short."""
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
        """Bytes of chunks in the daemon, and of credit that writers have."""
        return self._unproven.used_bytes + self._proven.used_bytes

    def count(self, session_id: str) -> int:
        """Transfers of a session under way."""
        return len(self._by_session.get(session_id, ()))

    @contextmanager
    def open(self, session_id: str, job: str, urgency: Urgency) -> Iterator[Transfer]:
        """A transfer, as long as the block runs; what it holds then is given back."""
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
            self._give_back(transfer, transfer.held_bytes)
            transfer.ended.cancel()

    def end_session(self, session_id: str) -> None:
        """Ends all transfers of a session that has ended."""
        for transfer in self._by_session.get(session_id, ()):
            transfer.end(NotFoundError("the session ended while its bytes were streamed; open a new one"))

    async def reserve(self, transfer: Transfer, nbytes: int) -> None:
        """Takes room for a transfer, in turn; returns when it has it."""
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
            # Otherwise it has the room, and gives it back at its end.
            raise

    def try_reserve(self, transfer: Transfer, nbytes: int) -> bool:
        """Takes room if there is some that nobody waits for; whether it did."""
        half = self._half(transfer)
        if half.next_queue is not None or half.used_bytes + nbytes > half.limit_bytes:
            return False
        self._take(half, transfer, nbytes)
        return True

    def stride_bytes(self, transfer: Transfer) -> int:
        """The largest chunk that the transfer may ask room for now."""
        half = self._half(transfer)
        return min(
            transfer.stride_bytes, max(FIRST_STRIDE_BYTES, (half.limit_bytes - half.pinned_bytes) // _LARGEST_SHARE)
        )

    def moved(self, transfer: Transfer, nbytes: int) -> None:
        """Gives room back: so many bytes have gone where they belong."""
        now = asyncio.get_running_loop().time()
        quickly = now - transfer.moved_at < STALLED_SECONDS
        if transfer.is_proven and quickly:
            transfer.stride_bytes = min(MAX_CHUNK_BYTES, transfer.stride_bytes * _GROWTH)
        else:
            transfer.stride_bytes = FIRST_STRIDE_BYTES
        transfer.moved_at = now
        self._give_back(transfer, nbytes)

    @contextmanager
    def pinned(self, transfer: Transfer, nbytes: int) -> Iterator[None]:
        """Of a transfer that failed, as long as the block runs: `nbytes` of what it holds cannot be given back yet."""
        self._give_back(transfer, transfer.held_bytes - nbytes)
        half = self._half(transfer)
        half.pinned_bytes += nbytes
        try:
            yield
        finally:
            half.pinned_bytes -= nbytes
            self._give_back(transfer, nbytes)

    def _half(self, transfer: Transfer) -> _Half:
        """Where its next room comes from; it stays where it is as long as it holds some."""
        moves = transfer.stride_bytes > FIRST_STRIDE_BYTES
        return self._half_of.get(transfer) or (self._proven if moves else self._unproven)

    def _take(self, half: _Half, transfer: Transfer, nbytes: int) -> None:
        if not transfer.held_bytes:
            transfer.moved_at = asyncio.get_running_loop().time()
            self._half_of[transfer] = half
            half.holders[transfer] = None
            self._keep_ticking()
        half.used_bytes += nbytes
        transfer.held_bytes += nbytes

    def _give_back(self, transfer: Transfer, nbytes: int) -> None:
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

    # --- those that stall

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
                    f"{STALLED_SECONDS:g} s where others wait for room, else stream_stall_seconds, "
                    f"{self._stall_seconds:g}); go on with a new one from the byte that you have"
                )
            )
            missing -= transfer.held_bytes
