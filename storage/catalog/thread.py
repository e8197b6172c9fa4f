"""The thread on which the catalog is used, so that its syncs do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


class CatalogThread:
    """A worker thread that runs all operations on the catalog, one after the other, for tasks of the event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "catalog")

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work`, which uses the catalog, on the worker thread; wait for it and return its result."""
        # A cancellation of the caller does not stop the work, because a transaction that has begun must come to a known
        # end.
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, work))

    def close(self) -> None:
        """Stop the worker thread, after it has done all work that it was given."""
        self._executor.shutdown()
