"""The settings of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The directories of the engine's files, its budgets, its threads and its timeouts."""

    state_dir: Path
    host_budget_bytes: int
    nvme_budget_bytes: int
    # The directories of the data files, one for each device; empty: one data file in the state directory.
    nvme_dirs: tuple[Path, ...] = ()
    # The number of threads for each data file.
    io_read_threads: int = 4
    io_write_threads: int = 2
    # The number of threads that compute updates.
    optimizer_threads: int = 1
    # The niceness of all threads above, from 0 to 19. Threads with 19 yield the most to other processes.
    worker_nice: int = 0
    # A device counts as stuck when one request takes longer than this.
    device_timeout_seconds: float = 30.0
    # The most bytes per second that background verification reads; 0: it is off.
    scrub_bytes_per_second: int = 0
    # The most bytes of prefetches under way at once.
    prefetch_bytes: int = 256 << 20
    # The time after which a request that waits for room in host memory is refused.
    admission_timeout_seconds: float = 60.0
    # The number of processes that may map the arena at once. Each has a slot in the arena's header.
    arena_slots: int = 0
    # The arena's name on a tmpfs; None: the arena has no name.
    arena_file: Path | None = None
    # Huge pages and locked memory for the arena. If the system refuses them, a warning is logged and they are not used.
    huge_pages: bool = False
    lock_memory: bool = False
    # Gives the weight of a job, by its name, against the other jobs in prefetching. By default all weigh the same.
    weight_of: Callable[[str], float] = lambda _: 1.0
    # The engine calls this on the event loop with the error of each damaged block that a read finds, again and again
    # if the block is read again.
    on_damage: Callable[[Exception], None] = lambda _: None
    # The most units of a model that a client maps in place at once where it is the only rank of its job here.
    units_of_a_rank_alone: int = 3
