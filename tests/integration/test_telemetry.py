"""Traces of real steps at an OpenTelemetry collector: the daemon's spans are children of the trainer's step."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from paramserver.contract.otlp import SpanSender
from tests.integration.support.daemon import Daemon
from tests.integration.support.ranks import free_port
from tests.integration.support.training import (
    Run,
    assert_bit_equal,
    launch,
    store_config,
    train_plain,
    train_through_store,
)
from tests.integration.support.waiting import wait_until
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError

for package in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.common"):
    pytest.importorskip(package, reason="needs the extra `telemetry`: pip install 'paramserver[telemetry]'")

from tests.integration.support.otlp_collector import Received, collecting  # noqa: E402

TRAINER, STORE = "paramserver-trainer", "paramserver"
SLACK_NANOSECONDS = 1_000_000


def steps_of(spans: list[Received]) -> dict[str, Received]:
    """Return the trainers' spans of steps, and of what came after the last one, by id."""
    return {span.span_id: span for span in spans if "paramserver.rank" in span.attributes}


def test_the_daemons_spans_are_children_of_the_trainers_step_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=of the team")
    config = {"host_budget": "128MiB", "nvme_budget": "1GiB", "metrics_listen": f"127.0.0.1:{free_port()}"}
    with collecting() as collector:
        with Daemon(tmp_path / "state", config | {"otlp_endpoint": collector.endpoint}) as daemon:
            section = {"address": daemon.address, "durability": "step", "telemetry": collector.endpoint}
            config_of_run = store_config(tmp_path / "unused") | {"paramserver": section}
            # The store counts an update to the step in which it begins, so each step leaves it time to begin its own.
            run = Run(steps=4, pause_seconds=0.2, config=config_of_run)
            traced = train_through_store(run)
            assert daemon.stop() == 0, daemon.log
        spans = list(collector.spans)
    assert_bit_equal(traced, train_plain(run))

    steps = steps_of(spans)
    names = ["step 1", "step 2", "step 3", "step 4"]
    assert sorted(step.name for step in steps.values()) == ["end of the run", *names]
    assert all(step.parent_id == "" and step.service == TRAINER for step in steps.values())
    assert len({step.trace_id for step in steps.values()}) == 5
    rows: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        if span.span_id not in steps:
            step = steps[span.parent_id]
            assert span.trace_id == step.trace_id
            # The store may go on with the work of a step when the step is over.
            assert step.began - SLACK_NANOSECONDS <= span.began <= span.ended, span
            rows[span.service].add(span.attributes.get("paramserver.row", span.name))
    assert rows[STORE] >= {"nvme write", "update", "optimizer", "commit", "sync"}
    assert rows[TRAINER] >= {"phases", "compute", "gathers", "fetches", "link: trainer to store"}
    of_store = [span for span in spans if span.service == STORE]
    assert {span.attributes["paramserver.job"] for span in of_store} == {"default"}
    assert {steps[span.parent_id].name for span in of_store if span.name == "update"} == set(names)
    assert all(metadata["x-key"] == "of the team" for metadata in collector.metadata)


def test_all_ranks_share_the_trace_of_a_step_and_other_steps_have_none(tmp_path: Path) -> None:
    with collecting() as collector:
        telemetry = {"endpoint": collector.endpoint, "every_steps": 2}
        # The job starts its daemon itself, which sends its spans to the same collector.
        config = store_config(tmp_path / "state", gather="collective", telemetry=telemetry)
        launch([Run(steps=4, config=config)], 2, tmp_path)
        spans = list(collector.spans)

    steps = steps_of(spans)
    by_name: dict[str, list[Received]] = defaultdict(list)
    for step in steps.values():
        by_name[step.name].append(step)
    assert by_name.keys() == {"step 1", "step 3", "end of the run"}
    for pair in by_name.values():
        first, second = sorted(pair, key=lambda step: int(step.attributes["paramserver.rank"]))
        assert first.parent_id == "" and second.parent_id == first.span_id
        assert first.trace_id == second.trace_id
    of_store = [span for span in spans if span.service == STORE]
    assert {span.name for span in of_store} >= {"update", "commit"}
    assert {span.parent_id for span in of_store} <= steps.keys()


def test_a_collector_that_is_away_costs_no_step_and_is_named_in_the_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    config = {"host_budget": "128MiB", "nvme_budget": "1GiB", "otlp_endpoint": endpoint}
    with Daemon(tmp_path / "state", config) as daemon:
        section = {"address": daemon.address, "telemetry": endpoint}
        run = Run(steps=2, config=store_config(tmp_path / "unused") | {"paramserver": section})
        with caplog.at_level("WARNING", logger="paramserver"):
            assert_bit_equal(train_through_store(run), train_plain(run))
        wait_until(lambda: "the OpenTelemetry collector did not take" in daemon.log)
        assert daemon.stop() == 0, daemon.log
        assert "Traceback" not in daemon.log
    assert "the OpenTelemetry collector did not take" in caplog.text


@pytest.mark.parametrize("disabled", [STORE, TRAINER])
def test_a_process_in_which_opentelemetry_is_turned_off_sends_no_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disabled: str
) -> None:
    config = {"host_budget": "128MiB", "nvme_budget": "1GiB", "metrics_listen": f"127.0.0.1:{free_port()}"}
    with collecting() as collector:
        monkeypatch.setenv("OTEL_SDK_DISABLED", str(disabled == STORE))
        with Daemon(tmp_path / "state", config | {"otlp_endpoint": collector.endpoint}) as daemon:
            monkeypatch.setenv("OTEL_SDK_DISABLED", str(disabled == TRAINER))
            section = {"address": daemon.address, "telemetry": collector.endpoint}
            run = Run(steps=2, config=store_config(tmp_path / "unused") | {"paramserver": section})
            traced = train_through_store(run)
            assert daemon.stop() == 0, daemon.log
            assert "Traceback" not in daemon.log
        services = {span.service for span in collector.spans}
    assert_bit_equal(traced, train_plain(run))
    # The daemon sends its spans only for trainers that send theirs.
    assert services == ({TRAINER} if disabled == STORE else set())


def test_spans_draw_nothing_from_pythons_random_generator() -> None:
    with collecting() as collector:
        before = random.getstate()
        sender = SpanSender(collector.endpoint, {"service.name": TRAINER})
        step = sender.begin_shared("step 1", 1.0, bytes(range(16)), is_root=True)
        sender.add(step.get_span_context(), "inner", 1.0, 2.0, {"paramserver.bytes": 5})
        sender.end(step, 3.0, {})
        sender.add(sender.parent_of(sender.traceparent_of(step)), "of another process", 1.5, 2.0, {})
        sender.close()
        assert random.getstate() == before
        spans = {span.name: span for span in collector.spans}
    assert spans["step 1"].trace_id == bytes(range(16)).hex() and spans["step 1"].span_id == bytes(range(8)).hex()
    assert spans["inner"].parent_id == spans["of another process"].parent_id == spans["step 1"].span_id
    assert spans["inner"].ended - spans["inner"].began == pytest.approx(1e9, abs=SLACK_NANOSECONDS)


@pytest.mark.parametrize(
    "header", ["", "00-0-0-01", f"00-{1:032x}-{2:016x}-00", f"00-{0:032x}-{2:016x}-01", "\x00" * 55]
)
def test_a_header_that_names_no_traced_step_is_ignored(header: str) -> None:
    with collecting() as collector:
        sender = SpanSender(collector.endpoint, {"service.name": STORE})
        assert sender.parent_of(header) is None
        sender.close()


def test_missing_packages_are_an_error_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = store_config(tmp_path / "state", telemetry="http://127.0.0.1:4317")
    with pytest.raises(
        ConfigError, match=r"paramserver\.telemetry\.endpoint = .*pip install 'paramserver\[telemetry\]'"
    ):
        train_through_store(Run(steps=1, config=config))


def test_the_address_of_a_collector_is_short_for_the_section() -> None:
    def telemetry(value: Any) -> Any:
        section = {"train_batch_size": 1, "paramserver": {"telemetry": value}}
        return load_config(section, {}).paramserver.telemetry

    assert telemetry("http://127.0.0.1:4317") == telemetry({"endpoint": "http://127.0.0.1:4317", "every_steps": 1})
    for wrong in ("127.0.0.1:4317", "ftp://a:1", "http://a", "http://a:99999", "http://a:4317/v1/traces"):
        with pytest.raises(ConfigError, match=r"paramserver\.telemetry\.endpoint"):
            telemetry(wrong)
    with pytest.raises(ConfigError, match=r"cross a network in the clear: use https://"):
        telemetry("http://collector.example:4317")
    assert telemetry("https://collector.example:4317").every_steps == 1
