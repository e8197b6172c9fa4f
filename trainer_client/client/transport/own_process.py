"""Whether an object is used in the process that made it, or in a forked child, which must not use it.

A child, such as a worker of a data loader, has copies of the engines, clients and sessions of its parent. It has
neither the threads that these work with, nor the right to their leases, so a call would wait without end.
"""

from __future__ import annotations

import os

import grpc

from trainer_client.errors import ForkedChildError


class OwnProcess:
    """The process that has made an object, which asks this class whether it is used in a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in the process that made the object, and not in a forked child.

        `close` of an object does nothing in a forked child, because a child has nothing to close.
        """
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise ForkedChildError if the caller runs in a forked child of the process that made the object."""
        if not self.is_here:
            raise ForkedChildError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this process is a forked child of process {self._pid}, whose session with the store it does not "
                "have: use the engine or the client there, for example before the worker is forked or in the loop that "
                "takes its results; in this process, connect a StoreClient of its own",
            )
