"""Found by the campaign: a commit that was refused because the catalog's log could not be synced may come true later.

SQLite has written the transaction's frames to its WAL by then, and leaves them there. Until another transaction
overwrites them, a process that is killed leaves a WAL from which the refused commit is recovered, though the job was
rolled back and the extents of the refused step were given to other bytes: the job then stands at a damaged step.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.faults.refusals import Way, refusals


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no `cc` on the PATH to compile the shim")
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.__getitem__)
def test_a_refused_and_rolled_back_step_does_not_come_back_when_the_process_is_killed(
    tmp_path: Path, error: int
) -> None:
    results = refusals(tmp_path, error, Way.KILL, "catalog.sqlite")
    assert results[-1].call == "sync catalog.sqlite-wal"
    assert [result for result in results if result.errors] == []
