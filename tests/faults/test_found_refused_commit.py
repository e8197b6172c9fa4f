"""Found by the campaign: a commit that was refused because the log could not be synced may become valid later.

By then SQLite has written the transaction's frames to its WAL, and it leaves them there. If the process is killed
before another transaction overwrites them, recovery finds the refused commit. But the job was rolled back, and the
extents of the refused step hold other bytes, so the job is at a damaged step.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.faults.refusals import Way, refusals


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no `cc` on the PATH to compile the shim")
# `make campaigns` also has the disk be full.
@pytest.mark.parametrize(
    "error",
    [errno.EIO, pytest.param(errno.ENOSPC, marks=pytest.mark.campaigns)],
    ids=errno.errorcode.get,
)
def test_a_refused_and_rolled_back_step_does_not_come_back_when_the_process_is_killed(
    tmp_path: Path, error: int
) -> None:
    results = refusals(tmp_path, error, Way.KILL, "catalog.sqlite")
    assert results[-1].call == "sync catalog.sqlite-wal"
    assert [result for result in results if result.errors] == []
