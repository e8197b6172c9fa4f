"""Prints what a machine with a GPU has, as JSON: `python -m tests.gpu.facts`.

These are the facts that the results of `make gpu-proof` depend on. A fact that cannot be read is null.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch


def text_of(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def driver() -> list[str] | None:
    """Return name, driver, link and memory of each GPU, as nvidia-smi prints them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    fields = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total,compute_mode"
    done = subprocess.run(
        [program, f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else None


def facts() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if cuda else None
    locked, most_locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    groups = Path("/sys/kernel/iommu_groups")
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "gpus": driver(),
        "capability": torch.cuda.get_device_capability() if cuda else None,
        "memlock_bytes": {"soft": locked, "hard": most_locked},
        "transparent_huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shared_memory_huge_pages": text_of("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "huge_pages_2mib": text_of("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"),
        "iommu_groups": len(list(groups.iterdir())) if groups.is_dir() else None,
        "gpudirect_storage": Path("/proc/driver/nvidia-fs").exists(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def main() -> None:
    print(json.dumps(facts(), indent=2))


if __name__ == "__main__":
    main()
