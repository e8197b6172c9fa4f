"""The store daemon: serves a node's training state over gRPC and runs the optimizer next to it.

This package owns the version of the distribution. It must never import a module of the daemon, because the client
imports this package for `paramserver.v1` and `paramserver.contract` and should not wait for the daemon's imports.
"""

from __future__ import annotations

from importlib import metadata

try:
    __version__ = metadata.version("paramserver")
except metadata.PackageNotFoundError:
    # The package was not installed: Python imports it from a source tree.
    __version__ = "0+source"
