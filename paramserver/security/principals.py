"""The principal of a call: who makes it, and what its token allows."""

from __future__ import annotations

import enum
import fnmatch
from dataclasses import dataclass

from paramserver.contract.replica_names import replicated_job


class Role(enum.StrEnum):
    """The rights of a token."""

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
        """Return whether the principal may see and use the job. Who may use a job may use its replicas, too."""
        # `fnmatchcase` treats names as plain text, so `*` also matches slashes and dots.
        names = [job] if (replicated := replicated_job(job)) is None else [job, replicated]
        return self.role is Role.ADMIN or any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.jobs for name in names
        )

    def allows_deletion(self, job: str) -> bool:
        """Return whether the principal may delete the job."""
        return self.role is Role.ADMIN or (self.may_delete and self.allows(job))


# The principal of every call to a daemon without a token file. Such a daemon relies on the mode of its socket and on
# certificates alone.
ANYONE = Principal(name="anyone", role=Role.ADMIN)
