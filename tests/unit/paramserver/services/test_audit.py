"""Calls that destroy or stop something are recorded with their result, in a line of a bounded length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from paramserver.events import EventKind, EventLog
from paramserver.process.audit_log import AuditLog
from paramserver.security.principals import Principal, Role
from paramserver.services.audit import Audit
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.errors import NotFoundError

OPERATOR = Principal(name="operator", role=Role.ADMIN)
TRAINER = Principal(name="trainer", role=Role.JOB, jobs=("a",))


class Call:
    """The part of gRPC's context that an audit asks for."""

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"


def logs(directory: Path, max_bytes: int) -> tuple[AuditLog, AuditLog]:
    """Return the logs of operators and of tokens of jobs."""
    return AuditLog(directory / "audit.jsonl", max_bytes), AuditLog(directory / "audit.jobs.jsonl", max_bytes)


async def test_a_call_is_recorded_with_its_result_which_is_also_raised(tmp_path: Path) -> None:
    log, of_jobs, events = *logs(tmp_path, 1 << 20), EventLog()
    audit, context = Audit(log, of_jobs, events), Call()

    async def fine() -> str:
        return "done"

    async def refused() -> NoReturn:
        raise NotFoundError(f"there is no job 'a'; known jobs: {'b' * (2 << 20)}")

    async def call(job: str, work: Any) -> Any:
        return await audit.call("DeleteJob", admin_pb.DeleteJobRequest(job=job), OPERATOR, context, work)  # type: ignore[arg-type]

    assert await call("a", fine()) == "done"
    with pytest.raises(NotFoundError, match="there is no job 'a'"):
        await call("c" * 5000, refused())
    text = log.path.read_text()
    first, second = map(json.loads, text.splitlines())
    assert (first["principal"], first["peer"], first["arguments"]) == ("operator", context.peer(), {"job": "a"})
    assert first["result"] == "OK" and second["result"].startswith("NOT_FOUND: there is no job 'a'")
    assert second["arguments"] == {"job": "c" * 1024}
    assert len(text) < 4096, "neither names nor the texts of errors make a line long"
    assert len(events.recent(10, kinds=[EventKind.ADMIN])) == 2


async def test_calls_with_a_token_of_jobs_do_not_push_out_what_operators_did(tmp_path: Path) -> None:
    of_operators, of_jobs = logs(tmp_path, 4000)
    audit, context = Audit(of_operators, of_jobs, EventLog()), Call()

    async def done() -> None:
        pass

    await audit.call("DeleteJob", admin_pb.DeleteJobRequest(job="a"), OPERATOR, context, done())  # type: ignore[arg-type]
    for number in range(100):
        request = admin_pb.ForgetStepRequest(job="a", name=f"{number}")
        await audit.call("ForgetStep", request, TRAINER, context, done())  # type: ignore[arg-type]
    (deleted,) = map(json.loads, of_operators.path.read_text().splitlines())
    assert (deleted["principal"], deleted["verb"], deleted["arguments"]) == ("operator", "DeleteJob", {"job": "a"})
    *_, newest = map(json.loads, of_jobs.path.read_text().splitlines())
    assert (newest["principal"], newest["arguments"]) == ("trainer", {"job": "a", "name": "99"})
