"""The accelerator that the tests of this folder use: a CUDA device, or the simulated device in its place.

With PARAMSERVER_GPU_STAND_IN=1 the tests that need no driver run on the simulated device of tests/device. Such a run
shows that the tests work. It says nothing about CUDA and NCCL.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.device import lag

STAND_IN = "PARAMSERVER_GPU_STAND_IN"

if os.environ.get(STAND_IN):
    lag.load()

# The marks of a test that needs an accelerator, and of one that needs CUDA itself.
NEEDS_ACCELERATOR = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or os.environ.get(STAND_IN)), reason="this machine has no CUDA device"
    ),
]
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def kind() -> str:
    """Return the kind of the accelerator, "cuda" or "lag"."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type


def backends() -> str:
    """Return the backends for `init_process_group`: gloo for the host's tensors, and that of the accelerator."""
    return f"cpu:gloo,{kind()}:{'nccl' if kind() == 'cuda' else kind()}"


def choose_deterministic_kernels() -> None:
    """Let torch use only kernels that give the same bits each time. Call this before the first kernel on CUDA.

    Of the kernels for attention only those of plain tensor operations are left, because the backward passes of the
    others add in any order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
