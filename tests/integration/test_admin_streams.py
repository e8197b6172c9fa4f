"""The admin tool in a pipe, on a full disk, without streams and without a directory: what it prints, and its status."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.support.daemon import Daemon
from tests.integration.support.forked import ROOT
from tests.integration.support.store_client import Clients
from tests.unit.storage.builders import Layout

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


def ended(*arguments: str, **streams: Any) -> tuple[int, str, str]:
    """Run `paramserver-admin`, and return its exit status and its outputs; "" for one that is not a pipe."""
    with started(*arguments, **streams) as process:
        output, errors = process.communicate(timeout=SECONDS)
    return process.returncode, output or "", errors


def verbs(daemon: Daemon, clients: Clients, job: str) -> Sequence[Sequence[str]]:
    """Return verbs of each form of output: a table, one JSON document, one that is printed in parts, and readings."""
    clients.rank(Layout(name=job, numels=(16,), groups=("a",))).begin().close()
    address = ("--address", daemon.address)
    return (
        ("tiers", *address),
        ("tiers", "--json", *address),
        ("health", *address),
        ("shards", job, "--json", *address),
        ("shards", job, "--limit", "1", *address),
        ("top", *address),
        ("top", "--json", *address),
        ("tiers", "--watch", "0.1", *address),
    )


def test_a_reader_that_has_ended_ends_every_verb_with_130_and_no_word(
    daemon: Daemon, clients: Clients, job: str
) -> None:
    for verb in verbs(daemon, clients, job):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            assert ended(*verb, stdout=writing) == (130, "", ""), verb
        finally:
            os.close(writing)


def test_a_full_disk_under_the_output_is_one_line_and_a_failure(daemon: Daemon, clients: Clients, job: str) -> None:
    for verb in verbs(daemon, clients, job):
        with Path("/dev/full").open("w") as full:
            said = "paramserver-admin: the output cannot be written: No space left on device\n"
            assert ended(*verb, stdout=full) == (1, "", said), verb


def test_the_result_of_a_check_of_a_directory_has_the_same_statuses(tmp_path: Path) -> None:
    with Daemon(tmp_path / "state") as daemon:
        assert daemon.stop() == 0
    for arguments in ((), ("--json",)):
        with Path("/dev/full").open("w") as full:
            code, _, errors = ended("fsck", str(tmp_path / "state"), *arguments, stdout=full)
        assert (code, errors.count("\n")) == (1, 1) and "cannot be written: No space left on device" in errors


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


@pytest.mark.parametrize("verb", [("delete-job", "job"), ("drain",)])
def test_a_question_is_not_in_the_output_and_ctrl_c_at_it_does_nothing(daemon: Daemon, verb: Sequence[str]) -> None:
    ours, theirs = pty.openpty()
    arguments = (*verb, "--json", "--address", daemon.address)
    with started(*arguments, stdin=theirs, stdout=subprocess.PIPE) as process:
        os.close(theirs)
        assert process.stderr is not None
        asked = ""
        while not re.search(r"\[y/N\]: $", asked):
            read = process.stderr.read(1)
            assert read, f"no question, but {asked!r}"
            asked += read
        # Python's `input` loses a signal that comes while it writes the end of the question.
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        output, errors = process.communicate(timeout=SECONDS)
    os.close(ours)
    assert (process.returncode, output) == (130, "")
    assert errors == "\nparamserver-admin: interrupted; nothing was done\n"


def test_it_runs_without_streams_and_in_a_deleted_directory(daemon: Daemon, tmp_path: Path) -> None:
    assert ended("tiers", "--address", daemon.address, shell='exec "$@" <&- >&-') == (0, "", "")
    # `fsck` loads torch.
    gone = f'mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir ../gone && exec "$@"'
    code, _, errors = ended("fsck", str(tmp_path / "none"), shell=gone)
    assert (code, errors) == (
        1,
        f"paramserver-admin: {tmp_path}/none has no catalog.sqlite: it is not a state directory\n",
    )
