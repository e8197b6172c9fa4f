"""The records of a machine's capacities and rates, which are given, published, or measured by the probe.

This module must never measure a rate.
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
        nvme_read, nvme_write: bytes that the node's NVMe reads, or writes, if it does only one of the two.
        nvme_both: bytes that the node's NVMe reads, while it writes the same number of bytes at the same time.
        update: elements that the optimizer threads of the store update together with AdamW.
        device_update: elements that a rank updates with AdamW on its GPU or, on the CPU, on all its threads; None: not
            known.
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
    """The rates by which a plan computes the time of a step, and where they are from.

    Attributes:
        of: returns the rates of each node, while all its ranks work, for a job on the ranks and nodes of a World.
        compute_seconds: returns the seconds of forward and backward of a rehearsed micro-batch on one rank.
        rates_from, compute_from: phrases for the output, which say where the rates and the compute time are from.
    """

    of: Callable[[World], Rates]
    compute_seconds: Callable[[Rehearsal], float]
    rates_from: str
    compute_from: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """The bytes of memory and disk that a machine has for a job.

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
    """Return the rate at which a device reads while it writes as many bytes, if it does one of both at a time."""
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
    """Return whether this user has the permission to see that a file or directory exists at `path`."""
    try:
        return path.exists()
    except OSError:
        return False
