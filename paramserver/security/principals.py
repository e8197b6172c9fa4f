"""The principal of a call: who makes it, and what its token allows."""

from __future__ import annotations

import enum
import fnmatch
from dataclasses import dataclass

from paramserver.contract.replica_names import replicated_job


class Role(enum.StrEnum):
    """What a token allows its holder, as the token file names it."""

    ADMIN = "admin"  # The token allows every call.
    JOB = "job"  # The token allows the data of some jobs, and no call of StoreAdmin.
    BORROWER = "borrower"  # The token allows another daemon to borrow host memory, and no other call.


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The owner of a token, on whose behalf a call is made. `jobs` are job names or patterns (`*`, `?`, `[a-z]`)."""

    name: str
    role: Role
    jobs: tuple[str, ...] = ()
    may_delete: bool = False

    def allows(self, job: str) -> bool:
        """Return whether the principal may see and use the job. A right to use a job covers the job's replicas, too."""
        # `fnmatchcase` treats a job's name as plain text and not as a path, so `*` in a pattern also matches slashes
        # and dots.
        names = [job] if (replicated := replicated_job(job)) is None else [job, replicated]
        return self.role is Role.ADMIN or any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.jobs for name in names
        )

    def allows_deletion(self, job: str) -> bool:
        """Return whether the principal may delete the job."""
        return self.role is Role.ADMIN or (self.may_delete and self.allows(job))


# The caller of every call to a daemon without a token file. Such a daemon has no other protection than the mode of its
# socket and certificates, so this principal may make all calls.
ANYONE = Principal(name="anyone", role=Role.ADMIN)
