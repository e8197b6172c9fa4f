"""The figures that the store sends to a session about its own work: counters of the tiers, its clock, and the spans of
the session's job."""

from __future__ import annotations

import time

import grpc

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.store_client import Clients, Rank, refused
from tests.unit.storage.builders import Layout

CODE = grpc.StatusCode


def train(rank: Rank, last: int = 2) -> Rank:
    rank.train(1, last)
    return rank


def test_counters_grow_with_what_the_tiers_do(clients: Clients, job: str) -> None:
    rank = clients.rank(Layout(name=job, numels=(5_000, 17), groups=("block.0", "block.1"))).begin()
    before = rank.call("ReadCounters")
    asked = time.monotonic()
    train(rank)
    after = rank.call("ReadCounters")

    assert asked <= after.monotonic_seconds <= time.monotonic(), "one node, one clock"
    assert before.monotonic_seconds < after.monotonic_seconds
    (old,), (new,) = ([tier for tier in r.tiers if tier.tier == pb.TIER_NVME] for r in (before, after))
    assert new.bytes_written > old.bytes_written
    assert new.write_seconds > old.write_seconds


def test_a_trace_has_the_spans_of_the_sessions_job_and_of_no_other(clients: Clients, job: str) -> None:
    ours = clients.rank(Layout(name=f"{job}-ours", numels=(5_000,), groups=("ours",))).begin()
    theirs = clients.rank(Layout(name=f"{job}-theirs", numels=(5_000,), groups=("theirs",))).begin()
    assert not ours.call("CollectSpans").spans
    train(theirs)
    train(ours)
    answer = ours.call("CollectSpans", ends=True)

    assert {span.activity for span in answer.spans} >= {"nvme write", "update", "optimizer", "commit", "sync"}
    assert {span.subject.split("/")[0] for span in answer.spans} == {"ours", "all groups"}
    assert len([span for span in answer.spans if span.activity == "commit"]) == 2
    assert all(0 < span.began_seconds <= span.ended_seconds <= answer.monotonic_seconds for span in answer.spans)
    assert not answer.dropped
    assert not theirs.call("CollectSpans", ends=True).spans, "nothing was noted for it: it had not asked"


def test_spans_are_those_of_a_job(clients: Clients) -> None:
    with refused(CODE.FAILED_PRECONDITION, "has not opened a job"):
        clients.client().call("CollectSpans")
