"""A vote for a commit whose call ends with its daemon, although the commit is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from paramserver.contract.channel import channel_to
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1.parameter_store_pb2_grpc import ParameterStoreStub
from trainer_client.base.recorder import Recorder
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.journal import Journal, JournaledVote
from trainer_client.client.transport.journal_state import JournalState
from trainer_client.client.transport.pending_calls import PendingCommit
from trainer_client.errors import StoreUnavailableError


class AttachedAgain:
    """Attachments whose current daemon is well, so the loss of another one is an error to them."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.current = object()
        self.changed = threading.Condition(threading.RLock())

    def outlive(self, former: object, error: Exception) -> None:
        assert former is self.current
        raise error

    def acknowledge(self, step: int) -> None:
        self.journal.acknowledge(step)


@pytest.fixture
def voted(tmp_path: Path) -> Iterator[tuple[Journal, PendingCommit]]:
    """A journal with a vote for step 5, and the vote's future after the rank has attached to the next daemon."""
    with channel_to(f"unix:{tmp_path}/gone.sock") as channel:
        call = ParameterStoreStub(channel).CommitStep.future(pb.CommitStepRequest(), timeout=10)
        assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
        journal = Journal()
        journal.open(most_bytes=0, durable_every=1)
        journal.step, journal.state = 5, JournalState.VOTED
        journal.vote = JournaledVote(step=5, client_state=b"", settled=4, attachment=cast(Any, object()), call=call)
        attachments = cast(Attachments, AttachedAgain(journal))
        yield journal, PendingCommit(attachments, journal.vote, Recorder())


def test_a_commit_that_the_next_daemon_has_shown_is_made(voted: tuple[Journal, PendingCommit]) -> None:
    journal, commit = voted
    journal.acknowledge(5)

    commit.wait()

    assert journal.acknowledged == 5


def test_a_commit_that_no_daemon_has_shown_is_not_made(voted: tuple[Journal, PendingCommit]) -> None:
    journal, commit = voted

    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        commit.wait()

    assert journal.acknowledged is None
