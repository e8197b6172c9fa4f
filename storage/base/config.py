"""The settings of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# The most bytes of prefetches under way at once, unless a configuration says otherwise.
PREFETCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The directories of the engine's files, its budgets, its threads and its timeouts, as `Engine.open` takes them."""

    state_dir: Path
    host_budget_bytes: int
    nvme_budget_bytes: int
    # The directories of the data files, one for each device. If there is none, one data file is in the state directory.
    nvme_dirs: tuple[Path, ...] = ()
    # The numbers of the threads that read each data file, and of those that write to it.
    io_read_threads: int = 4
    io_write_threads: int = 2
    # The number of threads that compute optimizer updates.
    optimizer_threads: int = 1
    # The niceness of the reading, writing and optimizer threads, from 0 to 19 (see nice(1)). With 19 they yield the
    # most processor time to other processes.
    worker_nice: int = 0
    # A device counts as stuck while one of its requests has taken longer than this.
    device_timeout_seconds: float = 30.0
    # The most bytes per second that background verification reads. 0 turns the verification off.
    scrub_bytes_per_second: int = 0
    prefetch_bytes: int = PREFETCH_BYTES
    # The time after which a request that waits for room in host memory is refused.
    admission_timeout_seconds: float = 60.0
    # The most processes that can map the arena at once, because each needs a slot in the arena's header.
    arena_slots: int = 0
    # The path of the arena's file on a tmpfs; None if the arena gets no file name.
    arena_file: Path | None = None
    # Whether the arena uses huge pages, and whether its memory is locked. If the system refuses one of them, the engine
    # logs a warning and goes on without it.
    huge_pages: bool = False
    lock_memory: bool = False
    # This function returns a job's weight, given its name. Jobs share the bandwidth of prefetches by weight; by default
    # all jobs have the same weight.
    weight_of: Callable[[str], float] = lambda _: 1.0
    # The engine calls this on the event loop with an error whenever a read finds a damaged block. If a later read finds
    # the same block damaged, the engine calls it again.
    on_damage: Callable[[Exception], None] = lambda _: None
    # The most units of a model that a client maps in place at once if it is its job's only rank on this node.
    units_of_a_rank_alone: int = 3
    # The most gradients that each client holds at once without parking them.
    gradients_of_a_rank: int = 4
    # The most bytes that are lent to other daemons, within the host budget.
    lend_bytes: int = 0
    # The most bytes that are lent to one other daemon; None if lend_bytes is the only limit.
    lend_bytes_per_borrower: int | None = None
