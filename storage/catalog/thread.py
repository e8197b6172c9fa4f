"""The thread that the catalog is used from, so that its syncs do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class CatalogThread:
    """One thread, which runs one piece of work after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "catalog")

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns on the thread."""
        # Not cancellable: a transaction that has begun must be known to have ended.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, work))

    def close(self) -> None:
        """End the thread when all work is done."""
        self._executor.shutdown()
