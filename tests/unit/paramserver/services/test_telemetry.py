"""The engine's spans become children of the step in which they began, also where ranks are not at the same step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from paramserver.contract.bearer import TRACEPARENT
from paramserver.services.telemetry import Telemetry
from storage.tracing import Activity, Span
from tests.unit.paramserver.sessions.builders import begin, serving
from tests.unit.storage.builders import Layout

for package in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.common"):
    pytest.importorskip(package, reason="needs the extra `telemetry`: pip install 'paramserver[telemetry]'")

from paramserver.contract.otlp import SpanSender  # noqa: E402
from tests.integration.support.otlp_collector import collecting  # noqa: E402

# More calls than the steps that are remembered of a job.
CALLS = 40


@dataclass
class Call:
    """The metadata that gRPC has of a rank's call, which names a step by its number, or no step."""

    step: int | None

    def invocation_metadata(self) -> Any:
        return () if self.step is None else ((TRACEPARENT, f"00-{self.step:032x}-{self.step:016x}-01"),)


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
            for name, at in began.items():
                label = f"{Layout().name}\nlayout/{name}/step"
                span = Span(activity=Activity.UPDATE, label=label, began_seconds=at, ended_seconds=at, nbytes=0)
                telemetry.note_span(span)
        sender.close()

    found = {str(span.attributes["paramserver.subject"]): int(span.parent_id, 16) for span in collector.spans}
    assert found == {"in 1/step": 1, "in 2/step": 2, "in 3/step": 3, "in 3, later/step": 3, "after a call of 2/step": 3}
