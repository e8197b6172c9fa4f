"""The campaign of readers, shortened: readers that open and close during commits leak no resource."""

from __future__ import annotations

from tests.faults import readers


def test_readers_beside_commits_see_the_bits_of_their_step_and_leave_nothing() -> None:
    report = readers.run(readers=300, commits=60, seed=1)
    assert report.failures == []
    assert report.readers > 200
    assert report.commits >= 60
    assert report.compared > 20
    assert report.endings["DEADLINE_EXCEEDED"] > 0
