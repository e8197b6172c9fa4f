"""The log of damaged blocks: it adds the parameters' names to a tier's error, and records the extents in the catalog.

This module owns the tasks that write to the catalog. It must never raise into the read that found the damage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from storage.base.errors import DamagedBlockError
from storage.catalog.catalog import Catalog
from storage.catalog.records import BadExtent
from storage.catalog.thread import CatalogThread
from storage.state.job_table import JobTable
from storage.tiers.extents import Extent

log = logging.getLogger(__name__)


class DamageLog:
    """Reports damaged blocks with the names of their parameters, and records damaged extents in the catalog.

    The durable tier calls `note` for each damaged block that it reads.
    """

    def __init__(
        self,
        jobs: JobTable,
        catalog: Catalog,
        catalog_thread: CatalogThread,
        on_damage: Callable[[DamagedBlockError], None],
    ) -> None:
        """Make a log without reports. `note` calls `on_damage` with each error, to which it has added the names."""
        self._jobs = jobs
        self._on_damage = on_damage
        self._catalog = catalog
        self._catalog_thread = catalog_thread
        self._notes: set[asyncio.Task[None]] = set()

    def note(self, error: DamagedBlockError, extents: Sequence[Extent]) -> None:
        """Add the names of the damaged parameters to `error`, and record extents that must not be used again."""
        error.fqns = self._jobs.fqns_at(error.label, error.offset, error.nbytes)
        self._on_damage(error)
        if extents:
            found = [BadExtent(extent=extent, reason=str(error), found_at=time.time()) for extent in extents]
            noted = asyncio.ensure_future(self._catalog_thread.run(lambda: self._catalog.add_bad_extents(found)))
            self._notes.add(noted)
            noted.add_done_callback(self._on_noted)

    async def close(self) -> None:
        """Wait until all extents that `note` has got are recorded in the catalog, or could not be recorded."""
        if self._notes:
            await asyncio.wait(self._notes)

    def _on_noted(self, noted: asyncio.Task[None]) -> None:
        self._notes.discard(noted)
        if not noted.cancelled() and (error := noted.exception()) is not None:
            log.error("blocks that were found damaged may be used again after a restart: %s", error)
