"""The machine of a plan: its capacities and rates, which are given, published, or measured by the probe.

This module owns these records. It must never measure.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_client.plan.layout import World
from trainer_client.plan.rehearsal import Rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of a node while all its ranks work, each per second.

    Attributes:
        copy: bytes that one thread copies in host memory.
        device_link: bytes that pass between host memory and one rank's device, one way.
        nvme_read, nvme_write: bytes that the node's NVMe reads, or writes, if it does nothing else.
        nvme_both: bytes each way, if it reads and writes the same number of bytes at the same time.
        update: elements that the optimizer threads of the store update together with AdamW.
        device_update: elements that a rank updates with AdamW on its device, or on all its threads; None: not known.
        collective: bytes of a whole buffer that a rank gathers from all ranks; None: there is one rank.
        host_memory: bytes that the node's host memory reads and writes together; None: not known.
    """

    copy: float
    device_link: float
    nvme_read: float
    nvme_write: float
    nvme_both: float
    update: float
    device_update: float | None
    collective: float | None
    host_memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRates:
    """All rates of a plan.

    Attributes:
        of: returns the rates of a node of a world while all its ranks work.
        compute_seconds: returns the seconds of forward and backward of a rehearsed micro-batch on one rank.
        rates_from, compute_from: two phrases that say where these are from.
    """

    of: Callable[[World], Rates]
    compute_seconds: Callable[[Rehearsal], float]
    rates_from: str
    compute_from: str


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
