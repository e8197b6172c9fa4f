"""A lender in the same process: the lending side of a real engine, without a network, and with faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from storage.base.errors import StorageError
from storage.tiers.lender import LenderError
from storage.tiers.lent import LentMemory, Loan


class LenderInProcess:
    """It fulfils `Lender` over the lent memory of another engine.

    Attributes:
        is_away: refuse new loans.
        is_stopped: answer nothing, like a process that was stopped.
        tamper: called with the address and the bytes of each span that is read, and changes the bytes.
        hidden: the addresses of spans that are answered as if they had been taken back.
    """

    def __init__(self, lent: LentMemory, address: str = "lender:1") -> None:
        self.address = address
        self.is_away = False
        self.is_stopped = False
        self.tamper: Callable[[int, memoryview], None] = lambda _address, _buffer: None
        self.hidden: set[int] = set()
        self.loans = 0
        self._lent = lent
        self._memory: MemoryInProcess | None = None

    async def borrow(
        self, size_bytes: int, on_size: Callable[[int], None], on_end: Callable[[str], None]
    ) -> MemoryInProcess:
        """Borrow of the other engine; see `Lender.borrow`."""
        if self.is_stopped:
            await asyncio.Event().wait()
        if self.is_away:
            raise LenderError("nothing answers")
        try:
            loan = self._lent.open("borrower", "token", "peer", size_bytes)
        except StorageError as error:
            raise LenderError(str(error)) from error
        self.loans += 1
        self._memory = MemoryInProcess(self, loan, on_size, on_end)
        return self._memory

    def die(self) -> None:
        """End the loan as the lender's death does, and be away from now on."""
        self.is_away = True
        if self._memory is not None:
            self._memory.end("the lender was killed")

    async def close(self) -> None:
        """End the loan."""
        if self._memory is not None:
            self._memory.close()


class MemoryInProcess:
    """It fulfils `BorrowedMemory`."""

    def __init__(
        self, lender: LenderInProcess, loan: Loan, on_size: Callable[[int], None], on_end: Callable[[str], None]
    ) -> None:
        self._lender = lender
        self._loan = loan
        self._on_end = on_end
        self._over = asyncio.Event()
        self._following = asyncio.ensure_future(self._follow(on_size))
        on_size(loan.size_bytes)

    async def read(self, spans: Sequence[tuple[int, memoryview]]) -> Sequence[bool]:
        """Copy out of the loan; see `BorrowedMemory.read`."""
        await self._answer()
        found = []
        for first_byte, buffer in spans:
            is_hidden = first_byte in self._lender.hidden
            data = None if is_hidden else self._loan.read(first_byte, len(buffer))
            if data is not None:
                buffer[:] = data
                self._lender.tamper(first_byte, buffer)
            found.append(data is not None)
        return found

    def keep(self, first_byte: int, data: memoryview) -> asyncio.Future[bool]:
        """Copy into the loan; see `BorrowedMemory.keep`."""
        return asyncio.ensure_future(self._keep(first_byte, bytes(data)))

    def discard(self, first_byte: int, nbytes: int) -> None:
        """Discard bytes of the loan, behind those that are being kept; see `BorrowedMemory.discard`."""
        asyncio.get_running_loop().call_soon(self._loan.discard, first_byte, nbytes)

    def close(self) -> None:
        """End the loan; see `BorrowedMemory.close`."""
        self._following.cancel()
        self._loan.end()
        self._over.set()

    def end(self, reason: str) -> None:
        """End the loan against the borrower's will."""
        self.close()
        self._on_end(reason)

    async def _keep(self, first_byte: int, data: bytes) -> bool:
        await self._answer()
        return self._loan.keep(first_byte, memoryview(data))

    async def _answer(self) -> None:
        if self._lender.is_stopped:
            await self._over.wait()
        if self._loan.is_ended:
            raise LenderError("the loan has ended")

    async def _follow(self, on_size: Callable[[int], None]) -> None:
        while True:
            await self._loan.changed.wait()
            self._loan.changed.clear()
            on_size(self._loan.size_bytes)
