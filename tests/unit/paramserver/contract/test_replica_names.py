"""The names of replicas of parts, and who may use them."""

from __future__ import annotations

from paramserver.contract.replica_names import name_replica, replicated_job
from paramserver.security.principals import Principal, Role


def test_the_job_of_a_replica_is_found_by_its_name() -> None:
    assert name_replica("gpt2", 3) == "gpt2@replica-3"
    assert replicated_job("gpt2@replica-3") == "gpt2"
    for name in ("gpt2", "gpt2@replica-", "@replica-1", "gpt2@replica-1b"):
        assert replicated_job(name) is None


def test_who_may_use_a_job_may_use_its_replicas_and_no_others() -> None:
    owner = Principal(name="alice", role=Role.JOB, jobs=("gpt2",))
    assert owner.allows("gpt2@replica-0")
    assert not owner.allows("gpt3@replica-0") and not owner.allows("gpt2@other")
