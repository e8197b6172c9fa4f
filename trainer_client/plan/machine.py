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
        device_link: bytes that pass between host memory and one rank's device, one way.
        nvme_read, nvme_write: bytes that the node's NVMe reads, or writes, if it does nothing else.
        nvme_both: bytes each way, if it reads and writes the same number of bytes at the same time.
        update: elements that one thread updates with AdamW in memory.
        collective: bytes of a whole buffer that a rank gathers from all ranks; None: there is one rank.
    """

    copy: float
    device_link: float
    nvme_read: float
    nvme_write: float
    nvme_both: float
    update: float
    collective: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds that the code of torch and of this library takes in a step besides the operations on tensors.

    Attributes:
        per_unit: the seconds for the forward and the backward of one unit.
        per_step: the seconds that are independent of the units, once in a step.
    """

    per_unit: float
    per_step: float


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


def capacities_here(directory: Path, ranks: int) -> Capacities:
    """Return the capacities of this machine: its memory, one GPU's memory, and the free bytes around `directory`."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    present = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    nvme = shutil.disk_usage(present).free
    if torch.accelerator.is_available():
        _, on_device = torch.accelerator.get_memory_info(0)
        return Capacities(device=on_device, host=host, nvme=nvme, is_cpu=False)
    return Capacities(device=host // ranks, host=host, nvme=nvme, is_cpu=True)
