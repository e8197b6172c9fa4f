"""A rank ends with the launcher that started it, and another child of that launcher does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paramserver.contract import launcher

ROOT = Path(__file__).parents[4]
# A rank says that it is bound, and waits for a line. Its launcher is the process that starts it, and waits for it.
RANK = """
from paramserver.contract.launcher import end_with_launcher
end_with_launcher()
print("bound", flush=True)
input()
print("alive", flush=True)
"""
LAUNCHER = f"""
import os, subprocess, sys
os.environ[{launcher.VARIABLE!r}] = str(os.getpid()) if sys.argv[1] == "this" else "1"
subprocess.Popen([sys.executable, "-c", {RANK!r}]).wait()
"""


@pytest.mark.parametrize(("bound_to", "output"), [("this", b""), ("another", b"alive\n")])
def test_a_rank_ends_when_its_launcher_is_killed(bound_to: str, output: bytes) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, bound_to],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"bound\n"

        process.send_signal(signal.SIGKILL)
        process.wait()
        if output:
            # The rank has the standard input of its launcher.
            process.stdin.write(b"\n")
            process.stdin.flush()
        # The output ends when the rank, which has it too, has ended.
        assert process.stdout.read() == output


def test_a_process_without_a_launcher_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launcher.VARIABLE, raising=False)
    launcher.end_with_launcher()
    monkeypatch.setenv(launcher.VARIABLE, "1")
    launcher.end_with_launcher()
