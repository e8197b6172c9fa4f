"""JSON keeps text as text and numbers as numbers, and the answers of several daemons are added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from paramserver.admin import printers, totals
from paramserver.admin.jobs import limited_table
from paramserver.admin.nodes import addresses_of, is_several
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb


def test_text_that_looks_like_a_number_stays_text() -> None:
    kept = admin_pb.KeptStep(name="1", note="22", step=3, layout="4", bytes=1 << 60)
    event = admin_pb.Event(number=1 << 60, kind="job", subject="7", text="-8", unix_seconds=1.5)
    assert json.loads(printers.to_json(kept)) == {
        **{"name": "1", "note": "22", "step": 3, "layout": "4", "world_size": 0},
        **{"kept_at_unix_seconds": 0.0, "committed_at_unix_seconds": 0.0, "bytes": 1 << 60, "alone_bytes": 0},
    }
    assert printers.values_of(event)["subject"] == "7" and printers.values_of(event)["number"] == 1 << 60
    steps = admin_pb.ListStepsResponse(steps=[admin_pb.StepInfo(step=5, kept_as=["6"])])
    (step,) = printers.values_of(steps)["steps"]
    assert (step["step"], step["kept_as"]) == (5, ["6"])


def tier(kind: pb.Tier, used: int, **fields: Any) -> admin_pb.TierInfo:
    return admin_pb.TierInfo(tier=kind, used_bytes=used, **fields)


def test_tiers_are_added_by_name() -> None:
    answers = [
        admin_pb.GetTiersResponse(
            tiers=[tier(pb.TIER_HOST, 1, hits=5), tier(pb.TIER_NVME, 10, problems=["bad"], read_seconds=0.5)],
            sessions=2,
            state_dir="/a",
            loop_stalls=1,
            longest_loop_stall_seconds=0.2,
        ),
        admin_pb.GetTiersResponse(
            tiers=[tier(pb.TIER_HOST, 2, hits=7), tier(pb.TIER_NVME, 20, read_seconds=0.25)],
            sessions=3,
            state_dir="/b",
            loop_stalls=4,
            longest_loop_stall_seconds=0.1,
        ),
    ]
    total = totals.tiers(answers)
    host, nvme = total.tiers
    assert (host.tier, host.used_bytes, host.hits) == (pb.TIER_HOST, 3, 12)
    assert (nvme.used_bytes, nvme.read_seconds, list(nvme.problems)) == (30, 0.75, ["bad"])
    assert (total.sessions, total.loop_stalls, total.longest_loop_stall_seconds) == (5, 5, 0.2)
    assert total.state_dir == ""


def test_a_job_of_several_daemons_is_at_the_lowest_step_of_them() -> None:
    sizes = [admin_pb.JobInfo.TierBytes(tier=pb.TIER_NVME, bytes=nbytes) for nbytes in (100, 200)]
    answers = [
        admin_pb.ListJobsResponse(jobs=[admin_pb.JobInfo(name="a", parameters=4, committed_step=7, bytes=sizes[:1])]),
        admin_pb.ListJobsResponse(
            jobs=[
                admin_pb.JobInfo(name="a", parameters=5, committed_step=6, durable_step=6, bytes=sizes[1:]),
                admin_pb.JobInfo(name="b", parameters=1),
            ]
        ),
    ]
    a, b = totals.jobs(answers).jobs
    assert (a.name, a.parameters, a.committed_step, a.HasField("durable_step")) == ("a", 9, 6, False)
    assert [(entry.tier, entry.bytes) for entry in a.bytes] == [(pb.TIER_NVME, 300)]
    assert (b.name, b.parameters, b.HasField("committed_step")) == ("b", 1, False)


def test_steps_accounts_queues_and_events_are_added() -> None:
    def step(number: int, alone: int, durable: bool) -> admin_pb.ListStepsResponse:
        info = admin_pb.StepInfo(step=number, alone_bytes=alone, durable=durable, readers=1)
        return admin_pb.ListStepsResponse(steps=[info])

    one, two = totals.steps([step(2, 5, True), step(1, 1, True), step(2, 6, False)]).steps
    assert (one.step, two.step, two.alone_bytes, two.durable, two.readers) == (1, 2, 11, False, 2)

    holding = admin_pb.TierAccount.Holding(holder="jobs", bytes=3)
    account = admin_pb.TierAccount(tier=pb.TIER_HOST, used_bytes=3, holdings=[holding], settled=True)
    answer = admin_pb.GetAccountsResponse(accounts=[account])
    (added,) = totals.accounts([answer, answer]).accounts
    assert (added.used_bytes, added.holdings[0].bytes, added.settled) == (6, 6, True)

    queue = admin_pb.GetPrefetchResponse(hits=1, jobs=[admin_pb.GetPrefetchResponse.Fetched(job="a", bytes=4)])
    both = totals.prefetch([queue, queue])
    assert (both.hits, both.jobs[0].bytes, len(both.jobs)) == (2, 8, 1)

    events = [
        admin_pb.ListEventsResponse(events=[admin_pb.Event(unix_seconds=seconds, text=str(seconds))])
        for seconds in (3.0, 1.0, 2.0)
    ]
    assert [event.text for event in totals.events(events).events] == ["1.0", "2.0", "3.0"]


def test_addresses_are_one_or_several_with_commas_or_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert addresses_of("unix:/a") == ["unix:/a"] and not is_several("unix:/a")
    assert addresses_of("a:1, b:2,a:1,") == ["a:1", "b:2"] and is_several("a:1, b:2")
    nodes = tmp_path / "nodes"
    nodes.write_text("# the nodes\na:1\n\n  b:2  # the second\n")
    assert addresses_of(f"@{nodes}") == ["a:1", "b:2"] and is_several(f"@{nodes}")
    for option in (None, "", ",", f"@{tmp_path}/missing"):
        with pytest.raises(typer.Exit) as caught:
            addresses_of(option)
        assert caught.value.exit_code == 2
    assert "cannot read the addresses" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "shown"), [(2, 2), (3, 3), (0, 3)])
def test_a_table_of_jobs_says_how_many_it_leaves_out(
    limit: int, shown: int, capsys: pytest.CaptureFixture[str]
) -> None:
    printers.console().print(limited_table([admin_pb.JobInfo(name=f"run-{i}") for i in range(3)], limit))
    text = capsys.readouterr().out
    assert [f"run-{i}" in text for i in range(3)] == [i < shown for i in range(3)]
    assert ("Only the first 2 of 3 jobs are shown" in text) == (shown < 3)
