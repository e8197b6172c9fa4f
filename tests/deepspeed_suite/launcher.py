"""DeepSpeed's launcher of ranks, adapted. The processes of the tests are forked from one that has imported this module.

Owns three adaptations. What a rank ends by is reported as an exception of Python, because the pool that runs the rank
would never get another one's result. A test whose ranks do not end fails, and does not end the session. The ranks of a
failed test are ended, because they may be waiting for each other. Must never make a failing test pass.
"""

from __future__ import annotations

import importlib
import traceback
from typing import Any

import pytest

from tests.deepspeed_suite import shim  # noqa: F401


class _Pytest:
    """pytest as the launcher sees it: the end of the session is the failure of the present test."""

    def exit(self, reason: str, returncode: int) -> None:
        """Fail the present test."""
        pytest.fail(reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(pytest, name)


common: Any = importlib.import_module("unit.common")
_dist_run = common.DistributedExec._dist_run


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


# The pool finds the function in the process of the rank by its name.
_run_rank.__name__ = _dist_run.__name__

common.pytest = _Pytest()
common.DistributedExec._dist_run = _run_rank
common.DistributedExec._close_pool = _close_pool
