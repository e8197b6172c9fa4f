"""The audit log has one line for each entry, stays within its bound, and never fails its caller."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest

from paramserver.process.audit_log import AuditLog


async def test_entries_are_lines_of_json_with_their_time_for_the_user_alone(tmp_path: Path) -> None:
    log, began = AuditLog(tmp_path / "audit.jsonl", 1 << 20), time.time()
    await log.note({"verb": "DeleteJob", "arguments": {"job": "a\nb"}})
    await log.note({"verb": "Drain"})
    first, second = map(json.loads, log.path.read_text().splitlines())
    assert first["arguments"] == {"job": "a\nb"} and second["verb"] == "Drain"
    assert began - 0.001 <= first["time"] <= second["time"] <= time.time() + 0.001
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


async def test_the_file_and_its_predecessor_stay_within_the_bound_and_keep_the_newest_entries(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", 4000)
    for number in range(200):
        await log.note({"number": number})
        sizes = [path.stat().st_size for path in (log.path, log.former_path) if path.exists()]
        assert sum(sizes) <= 4000
    lines = log.former_path.read_text() + log.path.read_text()
    numbers = [json.loads(line)["number"] for line in lines.splitlines()]
    assert numbers == list(range(200 - len(numbers), 200)) and len(numbers) > 40
    assert {path.name for path in tmp_path.iterdir()} == {"audit.jsonl", "audit.jsonl.1"}


async def test_an_entry_after_a_part_of_a_line_has_a_line_of_its_own(tmp_path: Path) -> None:
    """A full disk, or a crash, leaves a part of a line behind."""
    log = AuditLog(tmp_path / "audit.jsonl", 4000)
    await log.note({"verb": "Drain"})
    with log.path.open("a") as file:
        file.write('{"time": 17')
    await log.note({"verb": "DeleteJob"})
    await log.note({"verb": "Undrain"})
    first, torn, *others = log.path.read_text().splitlines()
    assert torn == '{"time": 17'
    assert [json.loads(line)["verb"] for line in (first, *others)] == ["Drain", "DeleteJob", "Undrain"]


async def test_an_entry_that_cannot_be_written_goes_to_the_daemons_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(tmp_path / "missing" / "audit.jsonl", 4000)
    with pytest.raises(OSError, match="No such file"):
        log.check()
    await log.note({"verb": "DeleteJob"})
    assert "cannot be written (No such file or directory)" in caplog.text and "DeleteJob" in caplog.text
