"""The exit status and output of `paramserver adopt`; the engine's tests check what it does to directories."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from paramserver.cli import app
from tests.unit.storage.builders import opened


def adopt(state_dir: Path, *nvme_dirs: Path) -> tuple[int, str]:
    flags = [flag for directory in nvme_dirs for flag in ("--nvme-dir", str(directory))]
    result = CliRunner().invoke(app, ["adopt", "--state-dir", str(state_dir), *flags])
    return result.exit_code, result.output


async def test_it_says_what_it_did_or_why_it_could_not(tmp_path: Path) -> None:
    data = tmp_path / "data"
    # The command starts an event loop of its own, so it needs a thread without one.
    assert await asyncio.to_thread(adopt, tmp_path / "state", data) == (
        1,
        f"paramserver: {tmp_path}/state has no catalog.sqlite: it is not a state directory\n",
    )
    async with opened(tmp_path / "state", nvme_dirs=(data,)):
        pass
    assert await asyncio.to_thread(adopt, tmp_path / "state", data) == (0, f"{data}: now of {tmp_path}/state\n")
    code, said = await asyncio.to_thread(adopt, tmp_path / ("x" * 300), data)
    assert code == 1 and said.startswith("paramserver: cannot look at ") and "File name too long" in said
