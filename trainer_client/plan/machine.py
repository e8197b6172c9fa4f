"""The machine of a plan: capacities and rates, as they were given or measured, each with its source.

Owns these records. Must never measure.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a node can do in a second while all its ranks work.

    Attributes:
        copy: bytes that one thread copies in host memory.
        device_link: bytes that pass between host memory and one rank's device, one way.
        nvme_read, nvme_write: bytes that the node's NVMe reads, or writes, with nothing else to do.
        nvme_both: bytes each way, if it reads and writes as many at once.
        update: elements that one thread updates with AdamW in memory.
        collective: bytes of a whole buffer that a rank gathers from all; None: there is one rank.
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
        per_unit: for the forward and the backward of each unit.
        per_step: once in a step.
    """

    per_unit: float
    per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """The bytes that there are.

    Attributes:
        device: of one rank's device; on the CPU a rank's share of host memory.
        host: of the node, for the ranks and the store.
        nvme: of the node's directory for the state.
        is_cpu: whether ranks compute on the CPU, so that device and host memory are the same.
    """

    device: int
    host: int
    nvme: int
    is_cpu: bool


def capacities_here(directory: Path, ranks: int) -> Capacities:
    """Return the capacities of this machine: its memory, one GPU's, and what is free around `directory`."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    present = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    nvme = shutil.disk_usage(present).free
    if torch.cuda.is_available():
        return Capacities(device=torch.cuda.get_device_properties(0).total_memory, host=host, nvme=nvme, is_cpu=False)
    return Capacities(device=host // ranks, host=host, nvme=nvme, is_cpu=True)
