"""If any system call of a step fails, the engine's or SQLite's, the step is refused and no older step is lost."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from tests.faults.refusals import Result, Way, refusals

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no `cc` on the PATH to compile the shim"),
]

# `make campaigns` also has the disk be full.
ERRORS = [errno.EIO, pytest.param(errno.ENOSPC, marks=pytest.mark.campaigns)]
DATA = "data."
CATALOG = "catalog.sqlite"


def assert_all_refused(results: list[Result]) -> None:
    assert {result.call.split()[0] for result in results} >= {"write", "sync"}
    assert [result for result in results if result.errors] == []
    assert [result for result in results if not result.refusal] == []


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [DATA, CATALOG])
def test_a_refused_step_can_be_left_behind_and_trained_anew(tmp_path: Path, name: str, error: int) -> None:
    # If one data write for several requests fails, the engine repeats it request by request. So the later calls must
    # fail, too, for the step to be refused.
    assert_all_refused(refusals(tmp_path, error, Way.ROLL_BACK, name, lasting=name == DATA))


def test_a_commit_that_the_catalog_refused_can_be_tried_again(tmp_path: Path) -> None:
    assert_all_refused(refusals(tmp_path, errno.EIO, Way.COMMIT_AGAIN, CATALOG))


def test_a_commit_that_is_tried_again_does_not_build_on_bytes_that_a_failed_sync_lost(tmp_path: Path) -> None:
    assert_all_refused(refusals(tmp_path, errno.EIO, Way.COMMIT_AGAIN, DATA, lasting=True))


def test_a_kill_after_a_failed_write_or_data_sync_does_not_bring_the_refused_step_back(tmp_path: Path) -> None:
    assert_all_refused(refusals(tmp_path, errno.EIO, Way.KILL, DATA, lasting=True))
