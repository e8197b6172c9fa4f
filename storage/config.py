"""What an engine is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Where the engine keeps its files, and how much of everything it may use."""

    state_dir: Path
    host_budget_bytes: int
    nvme_budget_bytes: int
    # Where the data files are, best one on each device; none: in the state directory.
    nvme_dirs: tuple[Path, ...] = ()
    io_read_threads: int = 4
    io_write_threads: int = 2
    optimizer_threads: int = 1
    # How far the threads above yield to others: 0 not at all, 19 as far as the system allows.
    worker_nice: int = 0
    # A device that takes longer for one request is stuck.
    device_timeout_seconds: float = 30.0
    # What background verification may read; 0: it is off.
    scrub_bytes_per_second: int = 0
    # Bytes of prefetches under way at once.
    prefetch_bytes: int = 256 << 20
    # How long a request waits for room in host memory before it is refused.
    admission_timeout_seconds: float = 60.0
    # How many processes may map the arena at once, each with a slot in its header.
    arena_slots: int = 0
    # A name for the arena, on a tmpfs; none: it has no name.
    arena_file: Path | None = None
    # Wishes for the arena: where the system does not grant them, it warns and goes on without.
    huge_pages: bool = False
    lock_memory: bool = False
    # The most units of a model that a client maps in place at once where it is the only rank of its job here.
    units_of_a_rank_alone: int = 3
