"""The admin tool in a pipe and on a terminal that cannot move its cursor: what it prints, and its status."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import ROOT

SECONDS = 60.0
PROGRAM = "import sys; sys.argv[0] = 'paramserver-admin'; from paramserver.__main__ import admin; admin()"
# A pipe is buffered, unless the environment says otherwise.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@contextmanager
def started(*arguments: str, shell: str = 'exec "$@"', **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Run `paramserver-admin` in a shell script, which finds the command in "$@". The end of the context kills it."""
    command = ["/bin/sh", "-c", shell, "sh", sys.executable, "-c", PROGRAM, *arguments]
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, text=True, stderr=subprocess.PIPE, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("verb", [("top", "--interval", "0.1"), ("tiers", "--watch", "0.1")])
@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_each_reading_is_printed_where_none_can_be_replaced(daemon: Daemon, verb: Sequence[str], terminal: str) -> None:
    """A pipe gets each of them, and so does a terminal that cannot move its cursor."""
    ours, theirs = pty.openpty() if terminal == "dumb" else os.pipe()
    env = f'TERM={terminal} COLUMNS=200 exec "$@"'
    with (
        os.fdopen(ours, encoding="utf-8", errors="replace") as output,
        started(*verb, "--address", daemon.address, shell=env, stdout=theirs) as process,
    ):
        os.close(theirs)
        for _ in range(2):
            while not next(output).startswith("Tiers of "):
                pass
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
