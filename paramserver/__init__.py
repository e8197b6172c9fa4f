"""The store daemon: serves a node's training state over gRPC and runs the optimizer next to it.

Owns the version of the distribution. Must never import a module of the daemon, because the client imports this package
for `paramserver.v1` and `paramserver.contract` and should not wait for the daemon's imports.
"""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("paramserver")
except metadata.PackageNotFoundError:
    # The package is imported from a source tree that was not installed.
    __version__ = "0+source"
