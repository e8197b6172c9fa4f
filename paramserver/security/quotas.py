"""Limits on how much of the store one job may use, and all jobs of one token together. Patterns of names select them.

This module owns the section `quotas` of the configuration. A quota limits a job; it reserves nothing for the job. The
jobs of a token are all jobs whose names the token allows, also those that a client with another token made. The catalog
holds these names, so the set is the same after a restart. A replica has a quota of its own, with the limits of its job.
Without that quota, a client with a token for the job could use the store without limits, because the token allows any
number of replicas of the job.
"""

from __future__ import annotations

import fnmatch
from functools import lru_cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from paramserver.contract.replica_names import replicated_job
from paramserver.contract.sizes import Size
from paramserver.security.principals import Principal, Role
from storage.base.errors import BudgetExceededError

_CACHED_JOBS = 4096


class Quota(BaseModel):
    """The limits of a job; None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_bytes: Annotated[Size, Field(ge=1 << 20)] | None = None
    nvme_bytes: Annotated[Size, Field(ge=1 << 20)] | None = None
    sessions: Annotated[int, Field(ge=1)] | None = None
    readers: Annotated[int, Field(ge=0)] | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000.0)] = 1.0

    def check_sessions(self, job: str, attached: int) -> None:
        """Raise BudgetExceededError unless one more session may attach to the job, which has `attached` sessions."""
        if self.sessions is not None and attached >= self.sessions:
            raise BudgetExceededError(
                f"the quota of job {job!r} allows {self.sessions} sessions, and {attached} are attached; stop one, or "
                "raise `sessions` in the daemon's `quotas`"
            )

    def check_readers(self, job: str, held: int) -> None:
        """Raise BudgetExceededError unless one more reader may hold a step of the job, which has `held` readers."""
        if self.readers is not None and held >= self.readers:
            raise BudgetExceededError(
                f"the quota of job {job!r} allows {self.readers} readers, and {held} are open; close one, or raise "
                "`readers` in the daemon's `quotas`"
            )


class JobQuota(Quota):
    """The limits of the jobs whose names match `pattern`, and of their replicas.

    A limit that is left out here is that of the section's `default`.
    """

    pattern: Annotated[str, Field(min_length=1)]


class TokenQuota(BaseModel):
    """The limits of all jobs of one token together; None means no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1)] = "*"
    host_bytes: Annotated[Size, Field(ge=1 << 20)] | None = None
    nvme_bytes: Annotated[Size, Field(ge=1 << 20)] | None = None
    jobs: Annotated[int, Field(ge=0)] | None = None
    sessions: Annotated[int, Field(ge=1)] | None = None
    readers: Annotated[int, Field(ge=0)] | None = None

    def check_jobs(self, token: str, held: int) -> None:
        """Raise BudgetExceededError unless one more job may be made with the token.

        `held` is the number of jobs in the store whose names the token allows, whichever token they were made with.
        """
        if self.jobs is not None and held >= self.jobs:
            raise BudgetExceededError(
                f"the quota of token {token}, jobs = {self.jobs}, is used up: there are {held} jobs that the token "
                "allows; delete one (`paramserver-admin delete-job`), or raise `jobs` in the daemon's `quotas`"
            )

    def check_readers(self, token: str, held: int) -> None:
        """Raise BudgetExceededError unless one more reader may be opened with the token, which has `held` readers."""
        if self.readers is not None and held >= self.readers:
            raise BudgetExceededError(
                f"the quota of token {token}, readers = {self.readers}, is used up: {held} readers are open; close "
                "one, or raise `readers` in the daemon's `quotas`"
            )


NO_TOKEN_QUOTA = TokenQuota()


class QuotasSection(BaseModel):
    """The section `quotas` of the configuration: the default limits, and those of jobs and tokens by pattern."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Quota = Quota()
    job: tuple[JobQuota, ...] = ()
    token: tuple[TokenQuota, ...] = ()


class Quotas:
    """A look-up of the quota of a job or token: the first one whose pattern matches the name, or else the default."""

    def __init__(self, section: QuotasSection) -> None:
        self._section = section
        self.of = lru_cache(_CACHED_JOBS)(self._find)

    def replace(self, section: QuotasSection) -> None:
        """Use the limits of a section that was read again from now on.

        A job or a token keeps what it has already, even if that exceeds the new limits.
        """
        self._section = section
        self.of.cache_clear()

    def of_token(self, principal: Principal) -> TokenQuota:
        """Return the limits of all jobs of a principal together; an admin has no limits."""
        if principal.role is Role.ADMIN:
            return NO_TOKEN_QUOTA
        candidates = (quota for quota in self._section.token if fnmatch.fnmatchcase(principal.name, quota.name))
        return next(candidates, NO_TOKEN_QUOTA)

    def _find(self, job: str) -> Quota:
        default = self._section.default
        names = [job] if (replicated := replicated_job(job)) is None else [job, replicated]
        for candidate in self._section.job:
            if any(fnmatch.fnmatchcase(name, candidate.pattern) for name in names):
                return default.model_copy(
                    update={field: getattr(candidate, field) for field in candidate.model_fields_set - {"pattern"}}
                )
        return default
