"""The contract of a lender: another daemon that lends its host memory, as the remote tier uses it.

The engine has no network, so the daemon fulfils this contract (`paramserver/lenders`). A lender needs no trust for the
integrity of the bytes, because the remote tier authenticates what it reads (`block_macs`). It does see the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

# A borrower cuts its transfers into spans of this many bytes: one call of `BorrowedMemory.keep` sends one, and each
# span of `BorrowedMemory.read` is at most as long.
SPAN_BYTES = 1 << 20


class LenderError(Exception):
    """The lender cannot be reached, refuses the loan, or has ended it. The message says why, for operators."""


class BorrowedMemory(Protocol):
    """The memory of one lender, from the grant of the loan to its end. All methods are called on the event loop.

    A call that raises LenderError says that the loan is over. All bytes that were kept in the loan are gone.
    """

    async def read(self, spans: Sequence[tuple[int, memoryview]]) -> Sequence[bool]:
        """Fill each buffer with the bytes from its address on, and return for each whether the lender has them.

        If the lender cannot buffer an answer at the moment, it answers that it does not have the bytes.

        A buffer is not touched any more when this has returned, raised or was cancelled.
        """
        ...

    def keep(self, first_byte: int, data: memoryview) -> asyncio.Future[bool]:
        """Send bytes, which are copied before this returns. The future's result is whether the lender had room."""
        ...

    def discard(self, first_byte: int, nbytes: int) -> None:
        """Tell the lender that bytes are of no use any more. Bytes that `keep` sends later are not discarded."""
        ...

    def close(self) -> None:
        """End the loan. A repeated call has no effect."""
        ...


class Lender(Protocol):
    """A daemon from which the remote tier borrows memory with `borrow`, once or again after a loan has ended."""

    @property
    def address(self) -> str:
        """The address, by which operators know the lender."""
        ...

    async def borrow(
        self, size_bytes: int, on_size: Callable[[int], None], on_end: Callable[[str], None]
    ) -> BorrowedMemory:
        """Borrow at most `size_bytes`, and return the memory.

        Args:
            on_size: called with the size of the loan before this returns, and whenever it changes.
            on_end: called once with the reason when the loan has ended, unless `close` ended it.

        Raises:
            LenderError: the lender cannot be reached, or refuses.
        """
        ...

    async def close(self) -> None:
        """End the loan, if there is one, and close the connection to the lender."""
        ...
