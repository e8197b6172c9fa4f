"""The engine's errors, one class for each reaction of the caller. Every message names its subject and the remedy."""

from __future__ import annotations

# The most parameters that the text of an error names.
MOST_SHOWN_FQNS = 8
# The git commit of this project that was the last to read catalogs before format 5 and regions with blocks of 16384
# bytes. Error messages name it to operators who have such a store.
LAST_READER = "05a259d6bebe230559f49dca4a9b73b9268d53e9"


class StorageError(Exception):
    """Base of all errors that the engine raises on purpose."""


class InvalidRequestError(StorageError):
    """The request is malformed, so the store refuses it in any state, and repeating it is of no use."""


class NotFoundError(StorageError):
    """The store does not have the job, group, slab or step that the caller names."""


class AlreadyExistsError(StorageError):
    """The job has committed steps, and the caller asked for a new one."""


class ConflictError(StorageError):
    """The request conflicts with the store's present state, such as another layout, another run, or a wrong order."""


class FormerFormatError(ConflictError):
    """Stored bytes have a format that this release does not read. The message names the Git commit that reads it."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"{found}. Commit {LAST_READER} is the last one that reads this. For each job run `paramserver-admin "
            "backup JOB DIR` at a daemon of that commit with this state directory, and `paramserver-admin restore JOB "
            "DIR` at a daemon of this release with another one"
        )


class NewerFormatError(ConflictError):
    """Stored bytes, or a client, use a codec that this release does not know."""


class OtherModelError(ConflictError):
    """The caller's model has other parameters than the stored job: their names or their shapes differ."""


class BudgetExceededError(StorageError):
    """A byte budget cannot hold the requested bytes.

    The message says whether the budget is too small at this moment or in any case.
    """


class DiskFullError(BudgetExceededError):
    """The file system is full, although the budget would allow the requested bytes."""


class StepAbortedError(StorageError):
    """The step under way was abandoned; the job goes on from its last committed step."""


class DataLossError(StorageError):
    """Stored bytes are lost or damaged, so the store cannot return them."""


class DamagedBlockError(DataLossError):
    """A block on NVMe does not have the bytes that were written.

    Attributes:
        label: the name of the slab and version.
        offset: the byte of the version at which the block begins.
        nbytes: the size of the block.
        fqns: the names of the parameters whose elements are in the block; empty if they are not known.
    """

    def __init__(self, label: str, offset: int, nbytes: int) -> None:
        super().__init__(label, offset, nbytes)
        self.label = label
        self.offset = offset
        self.nbytes = nbytes
        self.fqns: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The name of the slab and version for people; its label has a line feed between job and layout."""
        return self.label.replace("\n", ", layout ")

    def __str__(self) -> str:
        # A damaged checksum block may hold parts of thousands of small parameters, so the error names only the first
        # ones.
        more = f" and {len(self.fqns) - MOST_SHOWN_FQNS} more" if len(self.fqns) > MOST_SHOWN_FQNS else ""
        whose = f" ({', '.join(self.fqns[:MOST_SHOWN_FQNS])}{more})" if self.fqns else ""
        return (
            f"{self.version}: bytes {self.offset} to {self.offset + self.nbytes}{whose} on nvme are damaged, stale or "
            "of another shard; resume from an older step or a copy, and check the device"
        )


class DeviceError(StorageError):
    """The operating system refused an operation on a file, on memory or on a thread."""


class DeviceStuckError(DeviceError):
    """A device has not answered for too long. The operation continues in the background if the device answers again."""
