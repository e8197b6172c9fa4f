"""A verb that an older daemon does not know says that, and for which version it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from typer.testing import CliRunner

from paramserver import __version__
from paramserver.admin.cli import app


def test_a_call_that_the_daemon_does_not_know_is_explained(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/paramserver.sock"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(address)
    server.start()
    try:
        result = CliRunner().invoke(app, ["reload", "--address", address])
    finally:
        server.stop(None).wait()

    assert result.exit_code == 1
    assert result.stderr == (
        f"paramserver-admin: UNIMPLEMENTED: the daemon at {address} does not know this call; upgrade it to "
        f"{__version__}, which this tool has\n"
    )
