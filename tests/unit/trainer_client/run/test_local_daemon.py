"""What a rank does for its daemon before there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_client.run import local_daemon


def test_each_parent_of_a_new_state_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power could remove a directory whose parent is not synced, with all that was synced into it."""
    synced: list[Path] = []

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        local_daemon._make_directory(tmp_path / "a" / "state")
        assert synced == [tmp_path / "a", tmp_path], "a directory that is there has no new entry"
