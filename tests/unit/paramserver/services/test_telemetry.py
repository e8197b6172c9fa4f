"""The engine's spans become children of the step in which they began, also where ranks are not at the same step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from paramserver.contract.bearer import TRACEPARENT
from paramserver.services.telemetry import Telemetry
from paramserver.sessions.session import Session
from storage.base.tracing import Activity, Span
from tests.unit.paramserver.sessions.builders import begin, connect, join, serving
from tests.unit.storage.builders import Layout

for package in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.common"):
    pytest.importorskip(package, reason="needs the extra `telemetry`: pip install 'paramserver[telemetry]'")

from paramserver.contract.otlp import SpanSender  # noqa: E402
from tests.integration.support.otlp_collector import Collector, collecting  # noqa: E402

# More calls than the steps that are remembered of a job.
CALLS = 40


@dataclass
class Call:
    """The metadata that gRPC has of a rank's call, which names a step by its number, or no step."""

    step: int | None

    def invocation_metadata(self) -> Any:
        return () if self.step is None else ((TRACEPARENT, f"00-{self.step:032x}-{self.step:016x}-01"),)


def note_spans(telemetry: Telemetry, began: Mapping[str, float]) -> None:
    """Have an update noted at each time, whose group has the name of the time."""
    for name, at in began.items():
        label = f"{Layout().name}\nlayout/{name}/step"
        span = Span(activity=Activity.UPDATE, label=label, began_seconds=at, ended_seconds=at, nbytes=0)
        telemetry.note_span(span)


def steps_of(collector: Collector) -> dict[str, int]:
    """Return the step below which the collector has each update."""
    return {str(span.attributes["paramserver.subject"]): int(span.parent_id, 16) for span in collector.spans}


async def test_late_calls_of_a_rank_that_is_behind_begin_no_step_anew(tmp_path: Path) -> None:
    with collecting() as collector:
        sender = SpanSender(collector.endpoint, {"service.name": "store"})
        telemetry = Telemetry(sender)
        async with serving(tmp_path) as (engine, sessions):
            session = await begin(engine, sessions, Layout())

            def call(step: int | None) -> None:
                telemetry.note_call(session, cast(Any, Call(step)))

            began: dict[str, float] = {}
            for step in (1, 2, None, 3):
                call(step)
                began[f"in {step}"] = time.monotonic()
            for _ in range(CALLS):
                call(2)
                call(3)
            began["in 3, later"] = time.monotonic()
            call(2)
            began["after a call of 2"] = time.monotonic()
            note_spans(telemetry, began)
        sender.close()

    found = steps_of(collector)
    assert found == {"in 1/step": 1, "in 2/step": 2, "in 3/step": 3, "in 3, later/step": 3, "after a call of 2/step": 3}


async def test_a_rank_that_is_behind_in_a_step_without_a_trace_does_not_end_a_traced_one(tmp_path: Path) -> None:
    """With `every_steps`, one rank is in the traced step 2 while the other one still ends step 1."""
    with collecting() as collector:
        sender = SpanSender(collector.endpoint, {"service.name": "store"})
        telemetry = Telemetry(sender)
        async with serving(tmp_path) as (_, sessions):
            ahead, behind = connect(sessions), connect(sessions)
            spec = replace(Layout().job(), world_size=2, local_ranks=2)
            for rank, session in enumerate((ahead, behind)):
                await join(sessions, session, spec, rank=rank)
            began: dict[str, float] = {}

            def call(session: Session, step: int | None, name: str) -> None:
                telemetry.note_call(session, cast(Any, Call(step)))
                began[name] = time.monotonic()

            call(ahead, 2, "one rank is in 2")
            call(behind, None, "the other one still ends 1")
            call(behind, 2, "both are in 2")
            call(ahead, None, "one rank is in 3")
            call(behind, 2, "the other one still ends 2")
            call(behind, None, "both are in 3")
            # Another run takes no trace.
            for session in (ahead, behind):
                sessions.end(session, "closed", is_closed=True)
            await join(sessions, other := connect(sessions), Layout().job(), run_id="another")
            call(other, None, "another run")
            note_spans(telemetry, began)
        sender.close()

    found = steps_of(collector)
    in_two = ("one rank is in 2", "the other one still ends 1", "both are in 2")
    assert found == {f"{name}/step": 2 for name in in_two}
