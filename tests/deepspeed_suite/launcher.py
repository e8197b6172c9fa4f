"""DeepSpeed's launcher of ranks, adapted. The processes of the tests are forked from one that has imported this module.

This module owns five adaptations. What a rank ends by is reported as an exception of Python, because the pool that runs
the rank would never get another one's result. A test whose ranks do not end fails, and does not end the session. The
ranks of a failed test are ended, because they may be waiting for each other. A fixture that runs ranks is registered in
the way of this version of pytest, which does not find DeepSpeed's. On a machine without GPUs, what the tests compare
with is computed on the CPU, although they name a device by its number, and bf16 needs no CUDA. This module must never
make a failing test pass.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.deepspeed_suite import shim  # noqa: F401


class _Pytest:
    """pytest as the launcher sees it: the end of the session is the failure of the present test."""

    def exit(self, reason: str, returncode: int) -> None:
        """Fail the present test."""
        pytest.fail(reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(pytest, name)


common: Any = importlib.import_module("unit.common")
util: Any = importlib.import_module("unit.util")
_dist_run = common.DistributedExec._dist_run
_make_ddp: Any = DistributedDataParallel.__init__


def _run_rank(self: Any, *arguments: Any) -> Any:
    """Run a rank, with an exception of Python in place of any other, such as the failure of `pytest.raises`."""
    try:
        return _dist_run(self, *arguments)
    except BaseException as error:
        traceback.print_exc()
        raise AssertionError(f"{type(error).__name__}: {error}") from None


def _close_pool(self: Any, pool: Any, count: int, force: bool = False) -> None:
    """End the ranks of a test."""
    if force or not self.reuse_dist_env:
        pool.terminate()
        pool.join()


def _register_fixture(cls: Any, /, **_: Any) -> None:
    """Register a class of DeepSpeed's as the fixture of its name. The class itself stays, because ranks unpickle it."""
    if isinstance(cls.world_size, int):

        def run(request: pytest.FixtureRequest) -> None:
            cls()(request)

        setattr(sys.modules[cls.__module__], f"_run_{cls.__name__}", pytest.fixture(name=cls.__name__)(run))


def _agree(flag: bool, op: Callable[[Iterable[bool]], bool] = all) -> bool:
    """Return `op` of the flags of all ranks, which DeepSpeed's helper exchanges on a GPU."""
    flags = [flag] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(flags, flag)
    return op(flags)


def _make_reference(
    self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *arguments: Any, **options: Any
) -> None:
    """Make torch's DDP on the CPU, where it takes no numbers of devices."""
    _make_ddp(self, module, None, None, *arguments, **options)


# The pool finds the function in the process of the rank by its name.
_run_rank.__name__ = _dist_run.__name__

common.pytest = _Pytest()
common.DistributedExec._dist_run = _run_rank
common.DistributedExec._close_pool = _close_pool
if not torch.cuda.is_available():
    common.reduce_boolean_flags = _agree
    # The test of DeepSpeed asks for NCCL and CUDA, and CPUs compute in bf16 without them.
    util.bf16_required_version_check = lambda accelerator_check=True: True
    DistributedDataParallel.__init__ = _make_reference  # type: ignore[method-assign]
common.DistributedFixture.__init_subclass__ = classmethod(_register_fixture)
