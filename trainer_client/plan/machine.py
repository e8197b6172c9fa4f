"""The machine of a plan: its capacities and rates, which the user has given or the probe has measured.

This module owns these records. It must never measure.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of a node while all its ranks work, each per second.

    Attributes:
        copy: bytes that one thread copies in host memory.
        fresh_copy: bytes that one thread copies into memory that the process has just taken from the kernel, which
            fills each page with zeros first.
        device_link: bytes that pass between host memory and one rank's device, one way.
        nvme_read, nvme_write: bytes that the node's NVMe reads, or writes, if it does nothing else.
        nvme_both: bytes each way, if it reads and writes the same number of bytes at the same time.
        update: elements that one thread of the store updates with AdamW.
        update_limit: elements that all threads of the store together approach, because host memory bounds them, where
            all states are there; None: not known.
        device_update: elements that a rank updates with AdamW on its device, or on all its threads; None: not known.
        collective: bytes of a whole buffer that a rank gathers from all ranks; None: there is one rank.
        collective_latency: the seconds of a collective besides those of its bytes.
        host_memory: bytes that the node's host memory reads and writes together; None: not known.
    """

    copy: float
    fresh_copy: float
    device_link: float
    nvme_read: float
    nvme_write: float
    nvme_both: float
    update: float
    device_update: float | None
    collective: float | None
    collective_latency: float = 0.0
    host_memory: float | None = None
    update_limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverhead:
    """Seconds that this library's code takes in one step, besides those of forward and backward.

    Attributes:
        rank: the seconds of a rank.
        store: the CPU seconds of the daemon, and of other threads of the rank, that pass beside those of the rank. A
            rank whose computation needs all processors is delayed by them, too.
    """

    rank: float
    store: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds that this library's code takes in the steps of any model; see StepOverhead.

    Attributes:
        per_unit, store_per_unit: those of the rank and of the store for the forward and the backward of one unit.
        per_step, store_per_step: those that are independent of the units, once in a step.
    """

    per_unit: float
    per_step: float
    store_per_unit: float = 0.0
    store_per_step: float = 0.0

    def of_step(self, units: int) -> StepOverhead:
        """Return the seconds of a step that uses this number of units."""
        return StepOverhead(
            rank=self.per_step + units * self.per_unit, store=self.store_per_step + units * self.store_per_unit
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """The bytes that a machine has for a job.

    Attributes:
        device: the bytes of one rank's device; on the CPU, a rank's share of host memory.
        host: the bytes of host memory of the node, for the ranks and the store.
        nvme: the bytes that are free around the node's state directory.
        is_cpu: whether ranks compute on the CPU, so that device and host memory are the same.
    """

    device: int
    host: int
    nvme: int
    is_cpu: bool


def shared_rate(read: float, write: float) -> float:
    """Return the rate each way of devices that read and write as many bytes at once, and divide their time for it."""
    return 1 / (1 / read + 1 / write)


def capacities_here(directory: Path, ranks: int) -> Capacities:
    """Return the capacities of this machine: its memory, one GPU's memory, and the free bytes around `directory`."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    present = next(path for path in (directory.absolute(), *directory.absolute().parents) if _can_be_seen(path))
    nvme = shutil.disk_usage(present).free
    if torch.accelerator.is_available():
        _, on_device = torch.accelerator.get_memory_info(0)
        return Capacities(device=on_device, host=host, nvme=nvme, is_cpu=False)
    return Capacities(device=host // ranks, host=host, nvme=nvme, is_cpu=True)


def _can_be_seen(path: Path) -> bool:
    """Return whether this user sees that there is a file or a directory at `path`."""
    try:
        return path.exists()
    except OSError:
        return False
