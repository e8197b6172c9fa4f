"""What can go wrong in the engine, by what the caller can do about it. Every message names the thing and the remedy."""

from __future__ import annotations


class StorageError(Exception):
    """Base of all errors that the engine raises on purpose."""


class InvalidRequestError(StorageError):
    """The request is malformed, whatever the state of the store."""


class NotFoundError(StorageError):
    """The job, group or slab does not exist."""


class AlreadyExistsError(StorageError):
    """The job has committed steps, and the caller asked for a new one."""


class ConflictError(StorageError):
    """The request does not fit the present state: another layout, another run, out of order."""


class BudgetExceededError(StorageError):
    """A byte budget cannot hold what is asked for, now or ever, as the message says."""


class DiskFullError(BudgetExceededError):
    """The file system has no room for the bytes that the budget would allow."""


class StepAbortedError(StorageError):
    """The step under way was abandoned; the job goes on from its last committed step."""


class DataLossError(StorageError):
    """Bytes that were stored cannot be given back."""


class DamagedBlockError(DataLossError):
    """A block on NVMe is not what was written: `nbytes` at byte `offset` of the version that `label` names.

    `fqns`: whose parameters' bytes they are, where that is known.
    """

    def __init__(self, label: str, offset: int, nbytes: int) -> None:
        super().__init__(label, offset, nbytes)
        self.label = label
        self.offset = offset
        self.nbytes = nbytes
        self.fqns: tuple[str, ...] = ()

    def __str__(self) -> str:
        whose = f" ({', '.join(self.fqns)})" if self.fqns else ""
        # In a label, the name of a job's layout stands on a line of its own.
        version = self.label.replace("\n", ", layout ")
        return (
            f"{version}: bytes {self.offset} to {self.offset + self.nbytes}{whose} on nvme are damaged, stale or of "
            "another shard; resume from an older step or a copy, and check the device"
        )


class DeviceError(StorageError):
    """The operating system refused an operation on a file or on memory."""


class DeviceStuckError(DeviceError):
    """A device has not answered for too long. What was begun goes on by itself when it does."""
