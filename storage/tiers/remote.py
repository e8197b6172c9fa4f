"""The remote tier: clean copies of versions on NVMe, in host memory that other daemons lend.

This module owns the loans that this store has taken, and decides which reads go to a lender; remote_copies.py owns the
record of the copies. It must never be the only place of any byte: every copy is of a version whose region on NVMe is
complete or is being written at the same time. A lender may take its memory back, answer wrongly, or die at any moment;
the bytes then come from NVMe.

[Note: when a lender is used] A lender is on trial until both speeds are known: that of reads from it and that of reads
from NVMe, each as bytes over the time in which at least one read was under way, of the last RATE_BYTES. Afterwards the
lender is used while reads from it are faster. Every PROBE_EVERY-th read goes to NVMe nevertheless, so that the measured
speed of NVMe stays up to date. A lender that is slower than NVMe gets no more bytes, and is tried again after
`retry_seconds`.

[Note: a push waits little] An update writes a tile to NVMe and sends it to the lender at the same time. If NVMe is done
first, the update waits for the rest of the push only as long as the next read of these bytes will save (`patience`).
Blocks that were not sent by then are read from NVMe in the next step, beside those that are read from the lender. So a
lender that hangs holds up no update, and both links are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from storage.base.errors import DamagedBlockError
from storage.base.shard import TierName
from storage.base.shown_sizes import shown_size
from storage.tiers.base import TierCounters
from storage.tiers.block_macs import BlockMacs
from storage.tiers.contract import Move, Region
from storage.tiers.lender import SPAN_BYTES, BorrowedMemory, Lender, LenderError
from storage.tiers.loan_directory import RemoteCopy
from storage.tiers.remote_copies import RemoteCopies
from storage.tiers.source import MOST_SPANS_SENT, LenderInfo, LenderState, Rate, Source

log = logging.getLogger(__name__)

PROBE_EVERY = 64
# A read from a lender may take `timeout_seconds` for each such number of bytes, or part of it, that this store is
# reading from the lender at the time.
TIMEOUT_BYTES = 16 << 20


class RemoteRead(NamedTuple):
    """A move from a region that a lender can fill instead of NVMe: the lender, and its copy of the bytes."""

    move: Move[Region]
    source: Source
    copy: RemoteCopy


class RemoteTier:
    """Borrows memory from lenders, sends copies of versions there, and reads them back.

    It fulfils `CopyTier` in contract.py. `BackingTiers` uses it for each read and write of the durable tier.
    """

    name = TierName.REMOTE
    # This tier reports no problems: if a lender is lost, its bytes are read from NVMe. Operators see lost lenders in
    # `lenders`.
    problems: Sequence[str] = ()

    def __init__(
        self,
        lenders: Iterable[Lender],
        *,
        budget_bytes: int,
        timeout_seconds: float = 2.0,
        retry_seconds: float = 10.0,
        is_always_used: bool = False,
        on_event: Callable[[str, str], None] = lambda _address, _text: None,
    ) -> None:
        """Make a remote tier without loans. It borrows from its lenders once `start` was called.

        Args:
            lenders: the daemons that may lend.
            budget_bytes: the most bytes that are borrowed of all lenders together.
            timeout_seconds: the time in which a lender must answer; see TIMEOUT_BYTES.
            retry_seconds: the time for which a lender is not used after it was lost, was full, or was slower than NVMe.
            is_always_used: whether lenders are used even if they are slower than NVMe.
            on_event: called with the address of a lender and a sentence about it when it is lost or there again.
        """
        self.budget_bytes = budget_bytes
        self.counters = TierCounters()
        self._sources = [Source(lender) for lender in lenders]
        self._copies = RemoteCopies(self._sources, self.counters)
        self._nvme_rate = Rate()
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._is_always_used = is_always_used
        self._on_event = on_event
        self._macs = BlockMacs()
        self._tasks: list[asyncio.Task[None]] = []
        self._reads = 0

    # --- what operators see

    @property
    def used_bytes(self) -> int:
        """The bytes of loans that copies of versions take."""
        return sum(source.directory.used_bytes for source in self._sources)

    @property
    def queue_depth(self) -> int:
        """The number of lenders with reads under way."""
        return sum(source.asked_bytes > 0 for source in self._sources)

    @property
    def bandwidth(self) -> float | None:
        """The sum of the measured read speeds of the lenders in use, in bytes per second; None if none is measured."""
        return sum(source.rate.bytes_per_second or 0.0 for source in self._sources if source.is_used) or None

    @property
    def detail(self) -> str:
        """A text with the address and the state of each lender."""
        return "; ".join(f"{source.lender.address} ({source.state})" for source in self._sources)

    @property
    def lenders(self) -> list[LenderInfo]:
        """The state, the sizes, the speeds and the counters of each lender, for operators."""
        return [source.info(self._nvme_rate.bytes_per_second or 0.0) for source in self._sources]

    # --- loans

    def start(self) -> None:
        """Begin to borrow, in the background. A lender that is away is tried again and again."""
        self._tasks = [asyncio.ensure_future(self._borrow(source)) for source in self._sources]

    async def close(self) -> None:
        """Stop borrowing, and end all loans that this store has taken."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self._sources:
            self._end(source, "this daemon stops")
            await source.lender.close()

    async def _borrow(self, source: Source) -> None:
        while True:
            reason = await self._hold_loan(source)
            source.problem = reason
            if source.told != reason:
                source.told = reason
                log.warning("lender %s: %s", source.lender.address, reason)
                self._on_event(source.lender.address, f"no memory of this lender is used: {reason}")
            await asyncio.sleep(self._retry_seconds)

    async def _hold_loan(self, source: Source) -> str:
        """Borrow from a lender and wait until the loan ends; return the reason of its end or of the refusal."""
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        source.ended = ended
        on_size = partial(self._note_grant, source)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                # The store asks each lender for its whole remote budget, because the other lenders may be lost later. A
                # grant that is not used costs the lender nothing.
                memory = await source.lender.borrow(self.budget_bytes, on_size, partial(_settle, ended))
        except (LenderError, TimeoutError) as error:
            self._end(source, "")
            return str(error) or f"no answer for {self._timeout_seconds:g} s"
        source.memory, source.problem, source.told, source.full_until = memory, "", "", 0.0
        source.room_to_send = asyncio.Semaphore(MOST_SPANS_SENT)
        source.state = LenderState.IN_USE if self._is_always_used else LenderState.TRIAL
        source.rate.reset(source.bytes_read, source.reading.elapsed)
        self._share_budget()
        log.info(
            "lender %s lends %s, of which the budget allows %s",
            source.lender.address,
            *(shown_size(source.granted_bytes), shown_size(source.directory.size_bytes)),
        )
        self._on_event(source.lender.address, f"this lender lends {shown_size(source.granted_bytes)}")
        try:
            reason = await ended
        finally:
            self._end(source, "")
        source.losses += 1
        return reason

    def _note_grant(self, source: Source, size_bytes: int) -> None:
        source.granted_bytes = size_bytes
        self._share_budget()

    def _share_budget(self) -> None:
        """Divide the budget among the lenders that are used. A lender keeps what it has, and the first ones get more.

        So if a lender is lost, lends less, or is slower than NVMe, other lenders get its share of the budget.
        """
        sizes = {
            source: min(source.directory.size_bytes, source.granted_bytes) if source.is_used else 0
            for source in self._sources
        }
        rest = self.budget_bytes - sum(sizes.values())
        for source in filter(lambda source: source.is_used, self._sources):
            more = min(source.granted_bytes - sizes[source], rest)
            sizes[source] += more
            rest -= more
        for source, size_bytes in sizes.items():
            if size_bytes != source.directory.size_bytes:
                for copy in source.directory.resize(size_bytes):
                    self._copies.forget_dropped(copy)

    def _lose(self, source: Source, memory: BorrowedMemory, reason: str) -> None:
        """End a loan because a call of it has failed. Other calls of the same loan fail at once, too."""
        if source.memory is memory and source.ended is not None:
            _settle(source.ended, reason)
            self._end(source, reason)

    def _end(self, source: Source, reason: str) -> None:
        """Forget all copies in the memory of a lender, and end the loan."""
        memory, source.memory = source.memory, None
        source.state = LenderState.AWAY
        source.problem = reason or source.problem
        source.granted_bytes = 0
        self._share_budget()
        if memory is not None:
            memory.close()

    # --- copies

    def begin(self, region: Region, instead_of: Region | None, next_use: float) -> bool:
        """Allocate memory of a lender for a version; see `CopyTier.begin`."""
        return self._copies.begin(region, instead_of, next_use)

    def forget(self, region: Region) -> None:
        """Forget the copies of a version whose region was freed; see `CopyTier.forget`."""
        self._copies.forget(region)

    def has(self, region: Region) -> bool:
        """Return whether a lender has all bytes of a version; see `CopyTier.has`."""
        return self._copies.has(region)

    # --- reads

    def split(
        self, moves: Sequence[Move[Region]], durable: TierCounters
    ) -> tuple[Sequence[Move[Region]], Sequence[RemoteRead]]:
        """Return the moves that no lender can make, and those that `read` can make; see `CopyTier.split`."""
        if not self._copies:
            return moves, ()
        self._nvme_rate.sample(durable.bytes_read, durable.reading.elapsed)
        elsewhere: list[Move[Region]] = []
        reads: list[RemoteRead] = []
        for move in moves:
            found = self._copies.find(move.region)
            self._reads += 1
            is_probe = not self._is_always_used and self._reads % PROBE_EVERY == 0
            if found is None or is_probe or not found[1].owns(move.region, move.offset, len(move.buffer)):
                self.counters.misses += not is_probe
                elsewhere.append(move)
            else:
                reads.append(RemoteRead(move, *found))
        return elsewhere, reads

    async def read(self, reads: Sequence[RemoteRead], *, verified: bool) -> list[Move[Region]]:
        """Fill the buffers from the lenders, and return the moves that were not filled; see `CopyTier.read`.

        A filled buffer has the bytes that were sent to the lender, because this method checks the MAC of each block
        (see `BlockMacs`).
        """
        sources = dict.fromkeys(read.source for read in reads)
        parts = [[read for read in reads if read.source is source] for source in sources]
        filling = [self._read_from(source, part) for source, part in zip(sources, parts, strict=True)]
        filled = [read for part in await asyncio.gather(*filling) for read in part]
        seals = [copy.seals_of(move.offset, len(move.buffer)) for move, _, copy in filled]
        if filled:
            right = await asyncio.to_thread(self._find_right, filled, seals, verified=verified)
            for one, is_right in zip(filled, right, strict=True):
                if not is_right:
                    self._note_wrong(*one)
            filled = [one for one, is_right in zip(filled, right, strict=True) if is_right]
        # The reads that a lender has served are found by identity, because a comparison of moves would compare their
        # bytes.
        done = {id(move) for move, _, _ in filled}
        self.counters.hits += len(filled)
        self.counters.misses += len(reads) - len(filled)
        return [move for move, _, _ in reads if id(move) not in done]

    def _find_right(self, filled: Sequence[RemoteRead], seals: Sequence[memoryview], *, verified: bool) -> list[bool]:
        """Return for each read whether its bytes are those that were sent. The caller runs this on another thread."""
        return [
            self._macs.is_right(seal, *_sealed(move)) and (not verified or _is_right(move))
            for (move, _, _), seal in zip(filled, seals, strict=True)
        ]

    async def _read_from(self, source: Source, part: Sequence[RemoteRead]) -> list[RemoteRead]:
        """Read from one lender, and return the reads whose buffers it has filled."""
        memory = source.memory
        if memory is None:
            return []
        spans = [span for move, _, copy in part for span in _spans(copy, move)]
        nbytes = sum(len(move.buffer) for move, _, _ in part)
        source.asked_bytes += nbytes
        seconds = self._timeout_seconds * -(-source.asked_bytes // TIMEOUT_BYTES)
        try:
            with source.reading, self.counters.reading:
                async with asyncio.timeout(seconds):
                    found = iter(await memory.read([(address, buffer) for address, _, buffer in spans]))
        except TimeoutError:
            self._time_out(source, memory, f"a read of {shown_size(nbytes)} was not answered within {seconds:g} s")
            return []
        except LenderError as error:
            self._lose(source, memory, str(error))
            return []
        finally:
            source.asked_bytes -= nbytes
        filled = []
        for move, _, copy in part:
            gone = [(offset, len(piece)) for _, offset, piece in _spans(copy, move) if not next(found)]
            if not gone:
                source.hits += 1
                source.bytes_read += len(move.buffer)
                self.counters.bytes_read += len(move.buffer)
                filled.append(RemoteRead(move, source, copy))
            else:
                source.misses += 1
                # The lender did not send some bytes of the copy. It may have taken back only these, or may have had no
                # room for the answer, so the rest of the copy stays in use.
                for offset, nbytes in gone:
                    # A newer version of the slab may own the bytes that the lender did not send, and then keeps them.
                    if copy.owns(move.region, offset, nbytes):
                        copy.take(offset, nbytes)
        self._judge(source)
        return filled

    def _note_wrong(self, move: Move[Region], source: Source, copy: RemoteCopy) -> None:
        """Count wrong bytes of a lender and drop its copy, unless the store has overwritten the bytes meanwhile."""
        if not copy.owns(move.region, move.offset, len(move.buffer)):
            return
        source.wrong_blocks += 1
        if source.wrong_blocks == 1:
            text = f"the lender has returned wrong bytes of {move.region.label}, which were read from nvme instead"
            log.error("lender %s: %s", source.lender.address, text)
            self._on_event(source.lender.address, text.replace("\n", ", layout "))
        self._copies.drop(source, copy)

    def _judge(self, source: Source) -> None:
        """Stop using a lender for some time if reads from it are slower than reads from NVMe."""
        source.rate.sample(source.bytes_read, source.reading.elapsed)
        ours, nvme = source.rate.bytes_per_second, self._nvme_rate.bytes_per_second
        if self._is_always_used or ours is None or nvme is None or not source.is_used:
            return
        if ours >= nvme:
            source.state = LenderState.IN_USE
            return
        source.state = LenderState.SLOWER
        log.info("lender %s: %s/s, nvme: %s/s", source.lender.address, shown_size(ours), shown_size(nvme))
        for copy in source.directory.copies:
            self._copies.drop(source, copy)
        self._share_budget()
        asyncio.get_running_loop().call_later(self._retry_seconds, self._try_again, source, source.memory)

    def _try_again(self, source: Source, memory: BorrowedMemory | None) -> None:
        if source.memory is memory and source.state is LenderState.SLOWER:
            source.state = LenderState.TRIAL
            self._share_budget()
            source.rate.reset(source.bytes_read, source.reading.elapsed)

    # --- pushes

    async def push(self, moves: Sequence[Move[Region]]) -> None:
        """Send the bytes of those moves for whose versions `begin` made room; see `CopyTier.push`.

        The buffers are not touched any more when this has ended. If it was cancelled, a thread may still read them for
        a moment, but what it computes is not used.
        """
        for move in moves:
            found = self._copies.find(move.region)
            if found is None:
                continue
            source, copy = found
            if not copy.is_newest(move.region):
                continue
            number = copy.newest
            # The blocks that are sent have no owner until the lender has acknowledged them, because their old bytes in
            # the loan are overwritten. So they are not read from the lender meanwhile.
            copy.take(move.offset, len(move.buffer))
            seals = await asyncio.to_thread(self._macs.seal, *_sealed(move))
            if copy.newest == number:
                copy.put_seals(move.offset, seals)
            for address, offset, piece in _spans(copy, move):
                room_to_send = source.room_to_send
                await room_to_send.acquire()
                # While this push waited for its turn to send, the room in the loan may have passed to another slab, or
                # to a newer version of this one. Then the rest is not sent.
                if copy.is_dropped or copy.newest != number or (memory := source.memory) is None:
                    room_to_send.release()
                    break
                self._send(source, memory, copy, number, address, offset, piece, room_to_send)

    def _send(
        self,
        source: Source,
        memory: BorrowedMemory,
        copy: RemoteCopy,
        number: int,
        address: int,
        offset: int,
        piece: memoryview,
        room_to_send: asyncio.Semaphore,
    ) -> None:
        nbytes = len(piece)
        self.counters.writing.start()
        sent = memory.keep(address, piece)
        lost = f"{shown_size(nbytes)} were not taken within {self._timeout_seconds:g} s"
        alarm = asyncio.get_running_loop().call_later(self._timeout_seconds, self._time_out, source, memory, lost)

        def end(sent: asyncio.Future[bool]) -> None:
            alarm.cancel()
            self.counters.writing.stop()
            room_to_send.release()
            if sent.cancelled() or sent.exception() is not None:
                self._lose(source, memory, "the loan has ended" if sent.cancelled() else str(sent.exception()))
            elif sent.result():
                self.counters.bytes_written += nbytes
                if not copy.is_dropped:
                    copy.give(number, offset, nbytes)
            elif source.memory is memory:
                source.full_until = asyncio.get_running_loop().time() + self._retry_seconds
                self._copies.drop(source, copy)

        sent.add_done_callback(end)

    def _time_out(self, source: Source, memory: BorrowedMemory, reason: str) -> None:
        if source.memory is memory:
            source.timeouts += 1
            self._lose(source, memory, reason)

    def patience(self, moves: Sequence[Move[Region]]) -> float:
        """Return for how many seconds an update may wait for a push; see `CopyTier.patience`."""
        if self._is_always_used:
            return self._timeout_seconds
        sources = {found[0] for move in moves if (found := self._copies.find(move.region)) is not None}
        nvme = self._nvme_rate.bytes_per_second
        ours = min((source.rate.bytes_per_second or 0.0 for source in sources), default=0.0)
        nbytes = sum(len(move.buffer) for move in moves)
        if not sources:
            return 0.0
        if nvme is None or not ours:
            # The speed of a lender on trial becomes known only by reads of bytes that were sent to it. So an update
            # waits for the lender as long as the time-out allows, to let all bytes arrive.
            return self._timeout_seconds
        return max(0.0, nbytes / nvme - nbytes / ours)


def _spans(copy: RemoteCopy, move: Move[Region]) -> Iterator[tuple[int, int, memoryview]]:
    """Cut a move into spans; yield for each its address in the loan, its offset in the version, and its buffer."""
    size = SPAN_BYTES // copy.block_bytes * copy.block_bytes
    for start in range(0, len(move.buffer), size):
        yield copy.offset + move.offset + start, move.offset + start, move.buffer[start : start + size]


def _sealed(move: Move[Region]) -> tuple[str, int, memoryview, int]:
    """Return what the seals of a move's blocks cover, as the arguments of `BlockMacs.seal`."""
    return move.region.label, move.offset, move.buffer, move.region.block_bytes


def _is_right(move: Move[Region]) -> bool:
    with contextlib.suppress(DamagedBlockError):
        move.region.verify(move.offset, move.buffer)
        return True
    return False


def _settle(ended: asyncio.Future[str], reason: str) -> None:
    if not ended.done():
        ended.set_result(reason)
