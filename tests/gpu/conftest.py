"""The set-up of the tests on an accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.accelerator import choose_deterministic_kernels


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let a test use deterministic kernels only."""
    choose_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)
