"""The command `paramserver-admin`, run in this process against a daemon."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from paramserver.admin.cli import app


def admin(address: str, verb: str, *arguments: str, code: int = 0) -> str:
    """Run a verb, and return what it writes; check that it ends with the exit status `code`."""
    return _run(address, verb, *arguments, code=code).output


def admin_json(address: str, verb: str, *arguments: str, code: int = 0) -> Any:
    """Run a verb with `--json`, and return its one line of JSON, parsed."""
    (line,) = _run(address, verb, *arguments, "--json", code=code).stdout.splitlines()
    return json.loads(line)


def _run(address: str, verb: str, *arguments: str, code: int) -> Result:
    result = CliRunner().invoke(app, [verb, "--address", address, *arguments])
    assert result.exit_code == code, result.output
    return result
