"""The daemon and its trainer say that a budget is above what the disks can hold, with the size to set."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paramserver.contract.disk_room import room_of, too_large
from trainer_client.config.loading import load_config
from trainer_client.training.run.local_daemon import _tell_of_full_disk

MIB = 1 << 20


def test_files_on_one_disk_share_what_is_free_there_and_have_what_they_occupy(tmp_path: Path) -> None:
    files = [tmp_path / name / "data.0" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
    files[0].write_bytes(bytes(MIB))
    system = os.statvfs(tmp_path)
    # Other processes use the disk meanwhile.
    assert abs(room_of(files) - MIB - system.f_bavail * system.f_frsize) < 1 << 30


def test_a_budget_above_the_room_is_told_with_a_size_that_has_room(tmp_path: Path) -> None:
    file = tmp_path / "data.0"
    told = too_large("nvme_budget", 1 << 60, [file])
    assert told is not None and told.startswith(f"nvme_budget 1.0 EiB is more than {file} can have: ")
    (figure,) = re.findall(r"set nvme_budget to (\d+)MiB or less, or make room", told)
    assert abs((int(figure) << 20) - room_of([file])) < 1 << 30
    assert too_large("nvme_budget", MIB, [file]) is None
    assert too_large("nvme_budget", 1 << 60, [tmp_path / "missing" / "data.0"]) is None


@pytest.mark.parametrize(
    ("written", "is_told"), [({"nvme_budget": "1PiB"}, True), ({"nvme_budget": "1MiB"}, False), ({}, False)]
)
def test_a_trainer_tells_of_the_budget_that_its_config_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: dict[str, str], is_told: bool
) -> None:
    # The directory of a first start does not exist yet.
    state_dir = tmp_path / "state"
    _tell_of_full_disk(load_config({"paramserver": {"state_dir": str(state_dir), **written}}, {}), state_dir)
    assert ("paramserver.nvme_budget 1.0 PiB is more than" in caplog.text) == is_told
    assert bool(caplog.records) == is_told
