"""Who makes a call, and what they may do, as far as their token tells."""

from __future__ import annotations

import enum
import fnmatch
from dataclasses import dataclass


class Role(enum.StrEnum):
    """What a token is for."""

    ADMIN = "admin"  # everything
    JOB = "job"  # the data of some jobs, nothing of StoreAdmin


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who makes a call, as far as its token tells. `jobs` are names or patterns of names (`*`, `?`, `[a-z]`)."""

    name: str
    role: Role
    jobs: tuple[str, ...] = ()
    may_delete: bool = False

    def allows(self, job: str) -> bool:
        """Whether it may see and use the job."""
        # Names are data: a pattern's `*` also matches slashes and dots.
        return self.role is Role.ADMIN or any(fnmatch.fnmatchcase(job, pattern) for pattern in self.jobs)

    def allows_deletion(self, job: str) -> bool:
        """Return whether the principal may delete the job."""
        return self.role is Role.ADMIN or (self.may_delete and self.allows(job))


# Everybody, where there is no token file: the socket's mode and the certificates are all there is.
ANYONE = Principal(name="anyone", role=Role.ADMIN)
