"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _leaves_the_process_group() -> Iterator[None]:
    """End the process group that a test has made, as `zero.Init` does, so that the next test has none before it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
