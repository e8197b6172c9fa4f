"""The assembly of an engine's tiers from its configuration.

This module owns nothing. It must never leave a tier open if another one cannot be made. A tier that needs a
configuration of its own is made in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from storage.tiers.contract import BackingTier
from storage.tiers.extents import Extent
from storage.tiers.health import DeviceWatch
from storage.tiers.host import HostTier
from storage.tiers.lender import Lender
from storage.tiers.lent import LentMemory, LentSegments
from storage.tiers.nvme import NvmeTier, OnDamage
from storage.tiers.remote import RemoteTier


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
    lenders: Sequence[Lender],
    on_lender: Callable[[str, str], None],
    tracer: Tracer,
    on_damage: OnDamage,
) -> Tiers:
    """Make the host tier, the NVMe tier and, for `lenders`, the remote tier; return them with the tiers in `volatile`.

    Args:
        used: the extents that the catalog names, so that the NVMe tier does not give them out.
        volatile: other backing tiers. If this raises, the caller closes them.
        lenders, on_lender: see `Engine.open`.

    Raises:
        StorageError: see `Engine.open`.
    """
    async with AsyncExitStack() as undo:
        remote = None
        if lenders:
            remote = RemoteTier(
                lenders,
                budget_bytes=config.remote_budget_bytes,
                timeout_seconds=config.lender_timeout_seconds,
                retry_seconds=config.lender_retry_seconds,
                is_always_used=config.lenders_are_always_used,
                on_event=on_lender,
            )
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
            on_freed=None if remote is None else remote.copies.forget,
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
        backing = BackingTiers(volatile, nvme, watch, remote)
        lent = LentMemory(host, segments, config.lend_bytes, config.lend_bytes_per_borrower)
        tiers = Tiers(host=host, eviction_order=eviction_order, lent=lent, nvme=nvme, backing=backing)
        undo.pop_all()
    return tiers
