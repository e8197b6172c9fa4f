"""Deliberate faults of the engine, for the campaigns' own tests: a campaign that finds nothing in them finds nothing.

`python -m tests.faults.mutants NAME serve ...` is `paramserver serve ...` with the fault NAME in it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable

from storage import syscalls
from storage.host_cache import HostCache
from storage.reader import StepReader
from storage.scratch import ScratchRanges
from storage.slab import NEVER, HostCopy, Slab
from storage.tiers.arena import ArenaRange
from storage.tiers.nvme import NvmeRegion, NvmeTier

# A fault that is not in all calls is in every twentieth.
EVERY = 20


def _sync_nothing() -> None:
    """Data is not synced before the catalog names it."""
    syscalls.sync_data = lambda fd, path: None


def _forget_readers() -> None:
    """A reader that is closed keeps what it holds, now and then."""
    close, calls = StepReader.close, itertools.count(1)

    def forgetful(self: StepReader) -> None:
        if next(calls) % EVERY == 0:
            self.regions = {}
        close(self)

    StepReader.close = forgetful  # type: ignore[method-assign]


def _forget_new_versions() -> None:
    """The extents of a version whose write is cancelled or fails are not given back."""

    @contextlib.asynccontextmanager
    async def forgetful(self: NvmeTier, nbytes: int, label: str) -> AsyncIterator[NvmeRegion]:
        yield await self.allocate(nbytes, label)

    NvmeTier.new_version = forgetful  # type: ignore[method-assign]


def _forget_pins() -> None:
    """A copy stays pinned, now and then."""
    unpin, calls = HostCache.unpin, itertools.count(1)

    def forgetful(self: HostCache, slab: Slab, copy: HostCopy, next_use: float = NEVER) -> None:
        if next(calls) % EVERY:
            unpin(self, slab, copy, next_use)

    HostCache.unpin = forgetful  # type: ignore[method-assign]


def _forget_ranges() -> None:
    """The range of a gradient, or of bytes to put, leaves its job's account and is not freed, now and then."""
    free, calls = ScratchRanges.free, itertools.count(1)

    def forgetful(self: ScratchRanges, region: ArenaRange) -> None:
        if next(calls) % EVERY:
            free(self, region)
        else:
            self.let_go(region)

    ScratchRanges.free = forgetful  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "sync-nothing": _sync_nothing,
    "forget-readers": _forget_readers,
    "forget-new-versions": _forget_new_versions,
    "forget-pins": _forget_pins,
    "forget-ranges": _forget_ranges,
}


def main() -> None:
    """Runs the daemon with a fault in it."""
    from paramserver import cli  # noqa: PLC0415 - the campaign's processes use this module and need no daemon

    MUTANTS[sys.argv.pop(1)]()
    cli.main()


if __name__ == "__main__":
    main()
