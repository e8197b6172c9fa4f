"""Each listener gets spans with their jobs; without one, `traced` returns the function itself."""

from __future__ import annotations

import pytest

from storage.base.tracing import Activity, Span, Tracer


def test_a_span_is_told_when_it_has_ended_also_by_an_error() -> None:
    spans: list[Span] = []
    tracer = Tracer()
    tracer.listen(spans.append)

    with tracer.span(Activity.NVME_READ, "a job\nlayout/block.0[0:16]/param at step 3", 4096):
        assert spans == []
    with pytest.raises(KeyError), tracer.span(Activity.COMMIT, "a/b/all groups/step 4"):
        raise KeyError

    read, commit = spans
    assert (read.activity, read.nbytes, read.job) == (Activity.NVME_READ, 4096, "a job\nlayout")
    assert read.subject == "block.0[0:16]/param at step 3"
    assert read.began_seconds <= read.ended_seconds <= commit.began_seconds
    assert (commit.job, commit.subject) == ("a/b", "all groups/step 4"), "a job's name may have slashes"


def test_a_group_whose_name_has_slashes_belongs_to_its_job() -> None:
    """A module may be called `glue/mnli`, and so may a tensor of a StoreClient."""
    spans: list[Span] = []
    tracer = Tracer()
    tracer.listen(spans.append)
    with tracer.span(Activity.NVME_READ, "a/job\nlayout/heads.glue/mnli[0:16]/param at step 3"):
        pass
    with tracer.span(Activity.COMMIT, "a/job\nlayout/all groups/step 4"):
        pass

    assert [span.job for span in spans] == ["a/job\nlayout"] * 2
    assert [span.subject for span in spans] == ["heads.glue/mnli[0:16]/param at step 3", "all groups/step 4"]


def test_work_that_nobody_watches_is_the_work_itself() -> None:
    tracer, done = Tracer(), list[int]()

    assert tracer.traced(Activity.OPTIMIZER, "job/group/step 1", done.append) == done.append
    with tracer.span(Activity.UPDATE, "job/group/step 1"):
        done.append(1)

    spans: list[Span] = []
    tracer.listen(spans.append)
    tracer.traced(Activity.OPTIMIZER, "job/group/step 1", done.append)(2)
    assert done == [1, 2]
    assert [span.activity for span in spans] == [Activity.OPTIMIZER]


def test_a_listener_that_goes_within_a_span_is_not_called() -> None:
    tracer, stays = Tracer(), list[Span]()

    def goes(_: Span) -> None:
        pytest.fail("it has gone")

    tracer.listen(goes)
    tracer.listen(stays.append)
    with tracer.span(Activity.PREFETCH, "job/group/param at step 1"):
        tracer.ignore(goes)

    assert [span.activity for span in stays] == [Activity.PREFETCH]
    tracer.ignore(stays.append)
    assert not tracer.is_on
