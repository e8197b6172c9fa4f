"""Every metric has a name after Prometheus' rules and a meaning, and docs/metrics.md lists exactly the metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from paramserver.metrics import families
from paramserver.metrics.durations import Durations
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.base.tracing import Activity, Span

PAGE = Path(__file__).parents[4] / "docs" / "metrics.md"


def test_names_are_unique_and_follow_the_rules() -> None:
    figures: list[Any] = [
        *families.TIERS,
        *families.DEVICES,
        *families.LENDERS,
        *families.DAEMON,
        *families.JOBS,
        *families.SESSIONS,
    ]
    names = [figure.full_name for figure in figures]

    assert len(set(names)) == len(names)
    for figure in figures:
        assert re.fullmatch(r"paramserver_[a-z]+(_[a-z]+)*", figure.full_name)
        assert figure.full_name.endswith("_total") == figure.is_counter
        assert figure.meaning.endswith(".")


def test_a_figure_that_a_tier_does_not_have_is_left_out() -> None:
    tiers = [
        admin_pb.TierInfo(tier=pb.TIER_GPU, used_bytes=2),
        admin_pb.TierInfo(tier=pb.TIER_HOST, used_bytes=5, leased_bytes=3, problems=["slow", "full"]),
        admin_pb.TierInfo(tier=pb.TIER_NVME, used_bytes=7, devices=[admin_pb.TierInfo.Device(path="/d", used_bytes=7)]),
    ]
    found = {
        family.name: {sample.labels.get("tier"): sample.value for sample in family.samples}
        for family in families.tier_families(tiers)
    }

    assert found["paramserver_tier_used_bytes"] == {"gpu": 2, "host": 5, "nvme": 7}
    assert found["paramserver_tier_leased_bytes"] == {"gpu": 0, "host": 3}
    assert found["paramserver_tier_gradient_bytes"] == {"host": 0, "nvme": 0}
    assert found["paramserver_tier_problems"] == {"gpu": 0, "host": 2, "nvme": 0}
    assert found["paramserver_device_bandwidth_bytes_per_second"] == {}, "the speed is not measured yet"


def test_calls_and_operations_are_counted_by_their_ends() -> None:
    registry = CollectorRegistry()
    durations = Durations(registry)
    durations.note_call("AcquireLeases", grpc.StatusCode.OK, 0.004, is_stream=False)
    durations.note_call("AcquireLeases", grpc.StatusCode.RESOURCE_EXHAUSTED, 60.0, is_stream=False)
    durations.note_call("Session", grpc.StatusCode.CANCELLED, 9000.0, is_stream=True)
    durations.note_span(
        Span(activity=Activity.NVME_READ, label="a/b/c", began_seconds=1.0, ended_seconds=1.5, nbytes=4096)
    )
    # The format has labels in alphabetical order: the code, then the method.
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }

    assert samples["paramserver_rpc_seconds_count", "OK", "AcquireLeases"] == 1
    assert samples["paramserver_rpc_seconds_sum", "RESOURCE_EXHAUSTED", "AcquireLeases"] == 60.0
    assert samples["paramserver_streams_total", "CANCELLED", "Session"] == 1
    assert samples["paramserver_operation_seconds_sum", "nvme_read"] == 0.5
    assert samples["paramserver_operation_bytes_total", "nvme_read"] == 4096
    assert samples["paramserver_operation_seconds_count", "commit"] == 0, "a rate is known from the first commit on"


def test_the_page_lists_every_metric_with_its_meaning() -> None:
    registry = CollectorRegistry()
    Durations(registry)
    of_durations = {
        f"{family.name}{'_total' if family.type == 'counter' else ''}": family.documentation
        for family in registry.collect()
    }
    listed = dict(re.findall(r"^\| `(paramserver_\w+)`[^|]*\| ([^|]*?) \|", PAGE.read_text(), flags=re.MULTILINE))
    own = {"paramserver_build_info": "The daemon's version.", "paramserver_jobs": "Jobs in the catalog."}

    assert listed == dict(families.meanings()) | of_durations | own
