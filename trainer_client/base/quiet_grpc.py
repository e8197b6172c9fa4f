"""The first import of gRPC, which makes gRPC log its errors only.

At each fork of a process with calls under way, gRPC would print "Other threads are currently calling into gRPC,
skipping fork() handlers": one line for each worker of a data loader and epoch. The line reports no fault, because such
a child makes no calls of gRPC. (A child that makes calls over a client of its own is ended by gRPC if a thread of the
parent was in a call at the fork. $GRPC_ENABLE_FORK_SUPPORT=0 would suppress the line, too, but then no child could make
calls.)
"""

from __future__ import annotations

import os
import sys

VERBOSITY_VARIABLE = "GRPC_VERBOSITY"


def import_grpc_quietly() -> None:
    """Import gRPC unless it is imported already. A level that the user has set in $GRPC_VERBOSITY is left alone.

    If this function sets the variable, it removes it again, because programs that this process starts would inherit it.
    """
    if "grpc" in sys.modules or VERBOSITY_VARIABLE in os.environ:
        return
    os.environ[VERBOSITY_VARIABLE] = "ERROR"
    try:
        import grpc  # noqa: F401, PLC0415 - gRPC reads the variable while it is imported
    finally:
        del os.environ[VERBOSITY_VARIABLE]
