"""The store daemon: serves a node's training state over gRPC and runs the optimizer next to it.

Owns the version of the distribution. Imports nothing heavy: the client reaches the wire contract in `paramserver.v1`
through here and must not pay for the daemon.
"""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("paramserver")
except metadata.PackageNotFoundError:
    # The package is imported from a source tree that was not installed.
    __version__ = "0+source"
