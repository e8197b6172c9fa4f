"""The directory of an export appears when it is complete, and never takes the place of what is not an export."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from trainer_client.errors import ConfigError, ExportError
from trainer_client.exchange.destination import CHECKSUMS, open_destination


def write(path: Path, content: bytes, *, overwrite: bool = False) -> None:
    with open_destination(path, overwrite=overwrite) as target, target.create("weights") as file:
        file.write(content)


def test_it_appears_at_the_end_with_the_rights_of_any_directory(tmp_path: Path) -> None:
    path = tmp_path / "new" / "export"
    with open_destination(path, overwrite=False) as target:
        with target.create("weights") as file:
            file.write(b"some")
            assert file.tell() == 4
            file.write(memoryview(b" bytes"))
        assert not path.exists()
    digest = hashlib.sha256(b"some bytes").hexdigest()
    assert (path / CHECKSUMS).read_text() == f"{digest}  weights\n"
    assert [file.name for file in path.parent.iterdir()] == ["export"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask


def test_only_an_export_is_overwritten_and_only_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "export"
    write(path, b"former")
    with pytest.raises(ExportError, match="exists"):
        write(path, b"next")
    with pytest.raises(ZeroDivisionError), open_destination(path, overwrite=True) as target, target.create("weights"):
        raise ZeroDivisionError
    assert (path / "weights").read_bytes() == b"former"
    write(path, b"next", overwrite=True)
    assert (path / "weights").read_bytes() == b"next"
    (path / CHECKSUMS).unlink()
    with pytest.raises(ExportError, match="is not an export"):
        write(path, b"third", overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["export"]


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "export"
    with (
        pytest.raises(ExportError, match="exists"),
        open_destination(path, overwrite=False) as target,
        target.create("weights"),
    ):
        path.write_text("of another program")
    assert path.read_text() == "of another program"
    assert [file.name for file in tmp_path.iterdir()] == ["export"]


def test_a_copied_file_does_not_replace_one_of_the_export(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("mine")
    with (
        pytest.raises(ConfigError, match="which has a file of that name"),
        open_destination(tmp_path / "export", overwrite=False) as target,
    ):
        with target.create("weights"):
            pass
        target.copy(tmp_path / "weights")
    assert not (tmp_path / "export").exists()


def test_an_export_larger_than_the_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ExportError, match=r"needs 1\.0 EiB"),
        open_destination(tmp_path / "export", overwrite=False) as target,
    ):
        target.require(1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="file/export cannot be written: File exists"):
        write(tmp_path / "file" / "export", b"")


def test_the_entries_of_new_directories_above_it_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power could remove a directory whose parent is not synced, with the complete export in it."""
    synced: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(Path(f"/proc/self/fd/{descriptor}").readlink()))
    write(tmp_path / "new" / "of a run" / "export", b"bytes")
    assert synced >= {tmp_path, tmp_path / "new", tmp_path / "new" / "of a run"}
