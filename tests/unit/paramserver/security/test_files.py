"""A replaced file stays readable for the daemon, also if another user replaces it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paramserver.cli import app
from paramserver.security.certificates import make_certificates
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token, read_entries, remove_token


def owner_and_mode(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)


def test_tokens_and_certificates_keep_the_mode_of_their_file(tmp_path: Path) -> None:
    tokens, key = tmp_path / "tokens.toml", tmp_path / "server-key.pem"
    add_token(tokens, "first", Role.ADMIN)
    make_certificates(tmp_path, ["localhost"], ["trainer"], 1)
    for path in (tokens, key):
        assert owner_and_mode(path)[2] == 0o600
        path.chmod(0o640)
    before, contents = owner_and_mode(tokens), key.read_bytes()

    add_token(tokens, "second", Role.ADMIN)
    remove_token(tokens, "first")
    make_certificates(tmp_path, ["localhost"], ["trainer"], 1)

    assert owner_and_mode(tokens) == before and owner_and_mode(key)[2] == 0o640
    assert key.read_bytes() != contents


def test_a_token_that_is_removed_through_a_symbolic_link_is_removed_from_the_file_that_the_daemon_reads(
    tmp_path: Path,
) -> None:
    target, link = tmp_path / "daemon" / "tokens.toml", tmp_path / "tokens.toml"
    target.parent.mkdir()
    add_token(target, "stolen", Role.ADMIN)
    link.symlink_to(target)
    add_token(link, "other", Role.ADMIN)
    remove_token(link, "stolen")
    assert [entry.name for entry in read_entries(target)] == ["other"]
    assert link.is_symlink() and list(target.parent.iterdir()) == [target]


def test_symbolic_links_that_form_a_loop_are_refused_in_one_line(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(second)
    second.symlink_to(first)
    for arguments in (["add", str(first), "--name", "ops", "--admin"], ["remove", str(first), "--name", "ops"]):
        result = CliRunner().invoke(app, ["tokens", *arguments])
        assert result.exit_code == 1 and "Too many levels of symbolic links" in result.output
    assert first.is_symlink() and second.is_symlink()


def test_a_removed_token_does_not_come_back_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is synced after the new file has its name."""
    path = tmp_path / "tokens.toml"
    add_token(path, "stolen", Role.ADMIN)
    fsync, seen = os.fsync, list[tuple[bool, bool]]()

    def note(descriptor: int) -> None:
        is_directory = os.path.samestat(os.fstat(descriptor), tmp_path.stat())
        seen.append((is_directory, any(entry.name == "stolen" for entry in read_entries(path))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    remove_token(path, "stolen")
    assert seen == [(False, True), (True, False)], "first the new contents are synced, and then the new name"


def test_a_directory_that_cannot_be_synced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fsync = tmp_path / "tokens.toml", os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=rf"cannot be synced \(.*\); run `sync`: '{tmp_path}'"):
        add_token(path, "first", Role.ADMIN)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_root_changes_the_files_of_a_daemon_of_another_user(tmp_path: Path) -> None:
    tokens, key = tmp_path / "tokens.toml", tmp_path / "server-key.pem"
    add_token(tokens, "first", Role.ADMIN)
    make_certificates(tmp_path, ["localhost"], ["trainer"], 1)
    for path in (tokens, key):
        os.chown(path, 64000, 64001)

    remove_token(tokens, "first")
    make_certificates(tmp_path, ["localhost"], ["trainer"], 1)

    assert owner_and_mode(tokens) == owner_and_mode(key) == (64000, 64001, 0o600)
