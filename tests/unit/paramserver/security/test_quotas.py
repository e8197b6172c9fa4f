"""The quota of a job is that of the first pattern that its name matches; what it leaves out is the default's."""

from __future__ import annotations

import pytest
from pydantic import ByteSize

from paramserver.security.quotas import JobQuota, Quota, Quotas, QuotasSection
from storage.base.errors import BudgetExceededError

SECTION = QuotasSection(
    default=Quota(sessions=8, readers=3),
    job=(
        JobQuota(pattern="team-a/large", sessions=64, weight=4.0),
        JobQuota(pattern="team-a/*", sessions=16, nvme_bytes=ByteSize(1 << 30)),
        JobQuota(pattern="open-*", sessions=None),
        JobQuota(pattern="gpt2@replica-1", sessions=2),
        JobQuota(pattern="gpt2", sessions=4),
    ),
)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("anything", Quota(sessions=8, readers=3)),
        ("team-a/large", Quota(sessions=64, readers=3, weight=4.0)),
        ("team-a/small", Quota(sessions=16, readers=3, nvme_bytes=ByteSize(1 << 30))),
        ("Team-a/small", Quota(sessions=8, readers=3)),
        ("open-1", Quota(readers=3)),
        # A replica has the limits of its job, because a token for the job may make replicas of any number.
        ("team-a/large@replica-7", Quota(sessions=64, readers=3, weight=4.0)),
        ("gpt2@replica-0", Quota(sessions=4, readers=3)),
        ("gpt2@replica-1", Quota(sessions=2, readers=3)),
        ("gpt2@replicas", Quota(sessions=8, readers=3)),
    ],
)
def test_the_first_match_counts(job: str, expected: Quota) -> None:
    quotas = Quotas(SECTION)
    assert quotas.of(job) == expected
    assert quotas.of(job) is quotas.of(job), "it is asked for each chunk"


def test_nothing_is_limited_by_default() -> None:
    quota = Quotas(QuotasSection()).of("job")
    assert (quota.host_bytes, quota.nvme_bytes, quota.sessions, quota.readers, quota.weight) == (None,) * 4 + (1.0,)
    quota.check_sessions("job", 10_000)
    quota.check_readers("job", 10_000)


def test_what_is_full_is_named() -> None:
    quota = Quota(sessions=2, readers=0)
    quota.check_sessions("job", 1)
    with pytest.raises(BudgetExceededError, match="quota of job 'job' allows 2 sessions, and 2 are attached"):
        quota.check_sessions("job", 2)
    with pytest.raises(BudgetExceededError, match="quota of job 'job' allows 0 readers"):
        quota.check_readers("job", 0)
