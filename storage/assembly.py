"""The assembly of an engine's tiers from its configuration.

This module owns nothing. It must never leave a tier open that it has made if another one cannot be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from storage.base import syscalls
from storage.base.config import EngineConfig
from storage.base.failpoints import Failpoint, reach
from storage.base.tracing import Tracer
from storage.catalog.catalog import Catalog
from storage.jobs.directories import open_nvme
from storage.memory.host_cache import EvictionOrder
from storage.tiers.backing import BackingTiers
from storage.tiers.contract import BackingTier, CopyTier
from storage.tiers.extents import Extent
from storage.tiers.health import DeviceWatch
from storage.tiers.host import HostTier
from storage.tiers.lent import LentMemory, LentSegments
from storage.tiers.nvme import NvmeTier, OnDamage


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers of one engine, as `open_tiers` returns them to `Engine.open`.

    Attributes:
        eviction_order: the order in which copies are evicted from `host`.
        lent: lends free memory of `host` to other daemons.
        nvme: the durable tier, which is the last one in `backing`.
    """

    host: HostTier
    eviction_order: EvictionOrder
    lent: LentMemory
    nvme: NvmeTier
    backing: BackingTiers


async def open_tiers(
    config: EngineConfig,
    catalog: Catalog,
    used: Sequence[Extent],
    *,
    volatile: Sequence[BackingTier[Any]],
    copies: Sequence[CopyTier[Any]],
    tracer: Tracer,
    on_damage: OnDamage,
) -> Tiers:
    """Make the host tier and the NVMe tier, and return them with the tiers in `volatile` and `copies`.

    Args:
        used: the extents that the catalog names, so that the NVMe tier does not give them out.
        volatile, copies: other tiers; see `Engine.open`. If this raises, the caller closes them.

    Raises:
        StorageError: see `Engine.open`.
    """
    async with AsyncExitStack() as undo:
        nvme = await open_nvme(
            catalog,
            config.state_dir,
            config.nvme_dirs,
            used,
            budget_bytes=config.nvme_budget_bytes,
            read_threads=config.io_read_threads,
            write_threads=config.io_write_threads,
            nice=config.worker_nice,
            tracer=tracer,
            on_damage=on_damage,
            on_freed=[tier.forget for tier in copies],
        )
        undo.push_async_callback(nvme.close)
        reach(Failpoint.DURING_RECOVERY)
        syscalls.sync_directory(config.state_dir)
        eviction_order, segments = EvictionOrder(), LentSegments()
        host = HostTier(
            config.host_budget_bytes,
            eviction_order,
            segments.take_back,
            admission_timeout_seconds=config.admission_timeout_seconds,
            slots=config.arena_slots,
            arena_file=config.arena_file,
            huge_pages=config.huge_pages,
            lock_memory=config.lock_memory,
        )
        undo.push_async_callback(host.close)
        watch = DeviceWatch(config.device_timeout_seconds)
        undo.push_async_callback(watch.close)
        backing = BackingTiers(volatile, nvme, watch, copies)
        lent = LentMemory(host, segments, config.lend_bytes, config.lend_bytes_per_borrower)
        tiers = Tiers(host=host, eviction_order=eviction_order, lent=lent, nvme=nvme, backing=backing)
        undo.pop_all()
    return tiers
