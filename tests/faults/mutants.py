"""Deliberate faults of the engine, for the tests of the campaigns: each campaign must find them.

`python -m tests.faults.mutants NAME serve ...` runs `paramserver serve ...` with the fault NAME.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable

from storage.base import syscalls
from storage.base.integrity import BLOCK_BYTES
from storage.memory.host_cache import HostCache
from storage.memory.scratch import ScratchRanges
from storage.state.slab import NEVER, HostCopy, Slab
from storage.steps.reader import StepReader
from storage.tiers.arena import ArenaRange
from storage.tiers.nvme import NvmeRegion, NvmeTier

# An occasional fault happens in every twentieth call.
EVERY = 20
# The fault of ranges happens more often, because a short campaign on a busy machine frees only some ten ranges before
# it looks for leaks.
EVERY_RANGE = 4


def _sync_nothing() -> None:
    """Skip the sync of the data that precedes the catalog's transaction."""
    syscalls.sync_data = lambda fd, path: None


def _forget_readers() -> None:
    """Make some closed readers keep the regions that they hold."""
    close, calls = StepReader.close, itertools.count(1)

    def forgetful(self: StepReader) -> None:
        if next(calls) % EVERY == 0:
            self.regions = {}
        close(self)

    StepReader.close = forgetful  # type: ignore[method-assign]


def _forget_new_versions() -> None:
    """Leak the extents of a version whose write is cancelled or fails."""

    @contextlib.asynccontextmanager
    async def forgetful(
        self: NvmeTier, nbytes: int, label: str, block_bytes: int = BLOCK_BYTES
    ) -> AsyncIterator[NvmeRegion]:
        yield await self.allocate(nbytes, label, block_bytes)

    NvmeTier.new_version = forgetful  # type: ignore[method-assign]


def _forget_pins() -> None:
    """Skip some unpins, so that a host copy stays pinned."""
    unpin, calls = HostCache.unpin, itertools.count(1)

    def forgetful(self: HostCache, slab: Slab, copy: HostCopy, next_use: float = NEVER) -> None:
        if next(calls) % EVERY:
            unpin(self, slab, copy, next_use)

    HostCache.unpin = forgetful  # type: ignore[method-assign]


def _forget_ranges() -> None:
    """Remove some ranges of gradients, or of bytes to put, from their job's account without freeing them."""
    free, calls = ScratchRanges.free, itertools.count(1)

    def forgetful(self: ScratchRanges, range_: ArenaRange) -> None:
        if next(calls) % EVERY_RANGE:
            free(self, range_)
        else:
            self.hand_over(range_)

    ScratchRanges.free = forgetful  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "sync-nothing": _sync_nothing,
    "forget-readers": _forget_readers,
    "forget-new-versions": _forget_new_versions,
    "forget-pins": _forget_pins,
    "forget-ranges": _forget_ranges,
}


def main() -> None:
    """Run the daemon with a fault."""
    from paramserver import cli  # noqa: PLC0415 - the campaign's processes use this module and need no daemon

    MUTANTS[sys.argv.pop(1)]()
    cli.main()


if __name__ == "__main__":
    main()
