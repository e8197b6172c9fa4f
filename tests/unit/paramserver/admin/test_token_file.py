"""A file that holds no token is refused by its name, before anything is sent, and what it holds is not shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paramserver.admin.cli import app


@pytest.mark.parametrize("content", ["", "two words", "-----BEGIN\ns3cret\nEND-----\n", "s3cr\xe9t", "s3cret\x00"])
def test_a_file_that_holds_no_token_is_named_and_not_shown(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key.pem"
    path.write_text(content, encoding="utf-8")

    result = CliRunner().invoke(app, ["--token-file", str(path), "jobs", "--address", f"unix:{tmp_path}/none.sock"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"paramserver-admin: token file {path} must hold one token, as `paramserver tokens add` prints it\n"
    )
