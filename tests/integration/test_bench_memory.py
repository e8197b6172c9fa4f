"""Benchmarks report the memory of a process and its children, and see what is in use for a short time only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.common.processes import MemoryWatch, ProcessTree
from tests.integration.support.waiting import wait_until

MIB = 1 << 20
USED = 64 * MIB
# A program that starts a child, and a child that takes memory while its standard input says so.
CHILD = f"""
import sys
kept = []
for line in sys.stdin:
    kept = [bytearray({USED})] if line == "take\\n" else []
    print(line, end="", flush=True)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"


class Program:
    """A process whose only child takes memory and gives it back."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{word}\n"


@contextmanager
def program() -> Iterator[Program]:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Program(process)


def test_memory_that_a_child_has_taken_and_given_back_is_in_the_peak() -> None:
    with program() as started:
        started.tell("give back")
        tree = ProcessTree(started.process.pid)
        before = tree.memory()
        assert before.main > 0 and before.children > 0
        with MemoryWatch(tree) as watch:
            started.tell("take")
            wait_until(lambda: watch.peak.children - before.children > 0.95 * USED)
            started.tell("give back")
        after = tree.memory()

    assert watch.peak.children - before.children == pytest.approx(USED, rel=0.1)
    assert watch.peak.main - before.main < MIB
    assert after.children - before.children < MIB


def test_a_process_that_ends_ends_its_watch() -> None:
    with program() as started:
        started.tell("take")
        tree = ProcessTree(started.process.pid)
        with MemoryWatch(tree) as watch:
            before = watch.peak
            started.process.communicate()
    assert watch.peak.total >= before.total > USED
