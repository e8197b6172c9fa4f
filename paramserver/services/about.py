"""The description of a daemon for operators: its versions and its configuration.

This module owns nothing. It must never show a secret: the configuration has the paths of the files with secrets, and
nothing of what is in these files.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from pathlib import Path
from typing import Any

import grpc
import torch

from paramserver import __version__
from paramserver.config import DaemonConfig
from paramserver.v1 import store_admin_pb2 as admin_pb
from storage.catalog.tables import FORMAT_VERSION


def describe_config(config: DaemonConfig) -> admin_pb.GetConfigResponse:
    """Return every key with the value with which the daemon runs; a default that depends on other keys is resolved."""
    values = config.model_dump(mode="json") | {
        "socket": str(config.socket_path),
        "nvme_dirs": [str(path.absolute()) for path in config.nvme_dirs or (config.state_dir,)],
        "reserved_sessions": config.sessions_reserved,
        "audit_log": str(config.audit_path),
    }
    return admin_pb.GetConfigResponse(
        keys=[
            admin_pb.GetConfigResponse.Key(
                key=key,
                value=json.dumps(_absolute(getattr(config, key), values[key])),
                is_default=key not in config.model_fields_set,
            )
            for key in DaemonConfig.model_fields
        ]
    )


def _absolute(value: object, shown: Any) -> Any:
    """Return the form of a value that operators see; a path is shown as an absolute one."""
    return str(value.absolute()) if isinstance(value, Path) else shown


def describe_version(build: str, epoch: str, state_dir: Path, started_at: float) -> admin_pb.GetVersionResponse:
    """Return the versions of this process and of what it runs on."""
    return admin_pb.GetVersionResponse(
        version=__version__,
        build=build,
        epoch=epoch,
        state_dir=str(state_dir),
        host=socket.gethostname(),
        pid=os.getpid(),
        started_at_unix_seconds=started_at,
        python=platform.python_version(),
        torch=torch.__version__,
        grpc=grpc.__version__,
        catalog_format=FORMAT_VERSION,
    )
