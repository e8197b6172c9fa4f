"""Directories whose entries survive a loss of power."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paramserver.contract.durable_files import make_directory, sync_directory


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of all that is synced, in order."""
    paths: list[Path] = []

    def fsync(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_each_parent_of_a_new_directory_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: list[Path]
) -> None:
    """A loss of power could remove a directory whose parent is not synced, with all that was synced into it."""
    for _ in range(2):
        make_directory(tmp_path / "a" / "b" / "state")
        assert synced == [tmp_path / "a" / "b", tmp_path / "a", tmp_path], "an existing directory has no new entry"
    monkeypatch.chdir(tmp_path)
    make_directory(Path("c/state"))
    assert synced[3:] == [tmp_path / "c", tmp_path]


def test_a_new_directory_has_the_mode_that_is_asked_for(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "private", mode=0o700)
    assert stat.S_IMODE((tmp_path / "a" / "private").stat().st_mode) == 0o700


def test_only_a_directory_can_be_synced(tmp_path: Path, synced: list[Path]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        sync_directory(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        sync_directory(tmp_path / "gone")
    sync_directory(tmp_path)
    assert synced == [tmp_path]
