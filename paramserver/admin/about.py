"""The verbs `paramserver-admin config` and `version`."""

from __future__ import annotations

import json
from typing import Any

from paramserver import __version__
from paramserver.admin import printers, tables
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.nodes import Question, run
from paramserver.build import read_build
from paramserver.v1 import store_admin_pb2 as admin_pb


def config(address: Address = None, as_json: AsJson = False) -> None:
    """Show the configuration with which the daemon runs. It has paths of files with secrets, and no secret."""
    question = Question(
        call=lambda store, _: store.GetConfig(admin_pb.GetConfigRequest(), timeout=DEADLINE_SECONDS),
        show=tables.config_table,
        values=_config_values,
    )
    run(address, question, as_json=as_json)


def _config_values(response: admin_pb.GetConfigResponse) -> Any:
    return {
        "config": {key.key: json.loads(key.value) for key in response.keys},
        "defaults": [key.key for key in response.keys if key.is_default],
    }


def version(address: Address = None, as_json: AsJson = False) -> None:
    """Show the versions and builds of this tool and of the daemon, and the versions of what the daemon runs on."""
    build = read_build()
    question = Question(
        call=lambda store, _: store.GetVersion(admin_pb.GetVersionRequest(), timeout=DEADLINE_SECONDS),
        show=lambda response: tables.version_table(response, __version__, build),
        values=lambda response: {
            "client_version": __version__,
            "client_build": build,
            **printers.values_of(response),
        },
    )
    run(address, question, as_json=as_json)
