"""A process group that exchanges tensors and objects in host memory, whatever group the script has made for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def host_group() -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of all ranks that exchanges tensors in host memory. All ranks must call this.

    None is the script's own group, which need not do so: one of NCCL alone takes tensors of GPUs only.
    """
    if "cpu:" in dist.get_backend_config():
        yield None
        return
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
