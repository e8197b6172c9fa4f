"""A process group that exchanges tensors and objects in host memory, also if the script's own group cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def host_group() -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of all ranks that exchanges tensors in host memory. All ranks must call this.

    If the script's own default group can do so, None is yielded, which torch.distributed takes for the default group.
    Otherwise, for example if the default group has NCCL alone, a new group of gloo is yielded.
    """
    if "cpu:" in dist.get_backend_config():
        yield None
        return
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)
