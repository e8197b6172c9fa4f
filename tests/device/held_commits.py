"""Commits of states on the device whose copies begin when a test says so.

A thread copies these states and votes while the trainer goes on, so the scheduler decides how far it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from unittest import mock

from trainer_client.client.transport.channel import Pending
from trainer_client.client.transport.later_commit import LaterCommit, LaterCommits

# The thread fails, and so does its commit, if a test forgets it for so long.
LONGEST_SECONDS = 60


@contextmanager
def commits_held(may_copy: Event) -> Iterator[None]:
    """Have the thread begin each commit only while `may_copy` is set."""
    begin = LaterCommits.begin

    def begin_when_allowed(commits: LaterCommits, step: int, hand_over: Callable[[], Pending[None]]) -> LaterCommit:
        def wait_and_hand_over() -> Pending[None]:
            assert may_copy.wait(LONGEST_SECONDS), f"the copies of step {step} were not allowed"
            return hand_over()

        return begin(commits, step, wait_and_hand_over)

    with mock.patch.object(LaterCommits, "begin", begin_when_allowed):
        yield
