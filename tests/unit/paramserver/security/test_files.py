"""A replaced file stays readable for the daemon, also if another user replaces it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paramserver.security.certificates import make_certificates
from paramserver.security.principals import Role
from paramserver.security.tokens import add_token, remove_token


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
