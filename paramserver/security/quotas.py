"""How much of the store one job may have: limits by patterns of job names.

Owns the section `quotas` of the configuration. A quota bounds what a job takes from others; it reserves nothing for it.
"""

from __future__ import annotations

import fnmatch
from functools import lru_cache
from typing import Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from storage.errors import BudgetExceededError

_CACHED_JOBS = 4096


class Quota(BaseModel):
    """The limits of a job; None: none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_bytes: Annotated[ByteSize, Field(ge=1 << 20)] | None = None
    nvme_bytes: Annotated[ByteSize, Field(ge=1 << 20)] | None = None
    sessions: Annotated[int, Field(ge=1)] | None = None
    readers: Annotated[int, Field(ge=0)] | None = None
    weight: Annotated[float, Field(ge=0.001, le=1000.0)] = 1.0

    def check_sessions(self, job: str, attached: int) -> None:
        """Raises BudgetExceededError unless a session more may attach to the job."""
        if self.sessions is not None and attached >= self.sessions:
            raise BudgetExceededError(
                f"the quota of job {job!r} allows {self.sessions} sessions, and {attached} are attached; stop one, or "
                "raise `sessions` in the daemon's `quotas`"
            )

    def check_readers(self, job: str, held: int) -> None:
        """Raises BudgetExceededError unless a reader more may hold a step of the job."""
        if self.readers is not None and held >= self.readers:
            raise BudgetExceededError(
                f"the quota of job {job!r} allows {self.readers} readers, and {held} are open; close one, or raise "
                "`readers` in the daemon's `quotas`"
            )


class JobQuota(Quota):
    """The limits of the jobs whose names match; what it leaves out is as in the default."""

    pattern: Annotated[str, Field(min_length=1)]


class QuotasSection(BaseModel):
    """Section `quotas` of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    default: Quota = Quota()
    job: tuple[JobQuota, ...] = ()


class Quotas:
    """Finds the quota of a job: that of the first pattern that its name matches, else the default."""

    def __init__(self, section: QuotasSection) -> None:
        self._section = section
        self.of = lru_cache(_CACHED_JOBS)(self._find)

    def _find(self, job: str) -> Quota:
        default = self._section.default
        for candidate in self._section.job:
            if fnmatch.fnmatchcase(job, candidate.pattern):
                return default.model_copy(
                    update={field: getattr(candidate, field) for field in candidate.model_fields_set - {"pattern"}}
                )
        return default
