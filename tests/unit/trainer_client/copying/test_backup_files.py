"""The files of a backup in a local directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer_client.copying.backup_files import open_files


def test_the_entries_of_all_new_directories_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of power could remove a directory whose parent is not synced, with all files of the backup."""
    synced: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(Path(f"/proc/self/fd/{descriptor}").readlink()))
    root = tmp_path / "backups" / "of a job"
    files = open_files(str(root))
    with files.locked():
        files.write("shards/first", [b"bytes"])

    assert files.read("shards/first") == b"bytes"
    assert synced >= {tmp_path, tmp_path / "backups", root, root / "shards"}
