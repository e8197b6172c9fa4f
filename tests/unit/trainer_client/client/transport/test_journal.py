"""The journal hands the next daemon all that the old one may have lost, and hands no daemon the same entry twice."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import grpc
import pytest
import torch

from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.journal import Derived, Journal, JournaledVote, Value
from trainer_client.client.transport.journal_state import JournalState
from trainer_client.errors import StoreUnavailableError


class Entry:
    """An entry that records to which daemons the journal has handed it over."""

    def __init__(self) -> None:
        self.given_to: list[Attachment] = []

    def make(self, attachment: Attachment) -> None:
        self.given_to.append(attachment)


def attachments(count: int) -> list[Attachment]:
    """Return objects that stand for daemons; the journal never looks into them unless it has a vote to repeat."""
    return [cast(Any, object()) for _ in range(count)]


def opened() -> tuple[Journal, list[Entry]]:
    journal, entries = Journal(), [Entry(), Entry(), Entry()]
    journal.open(most_bytes=0, durable_every=1)
    journal.acknowledged = 4
    for entry in entries[:2]:
        journal.note(5, entry)
    return journal, entries


def test_what_is_handed_over_between_two_replays_is_given_by_the_second() -> None:
    """The training thread writes while another thread replays, because it has not noticed that the daemon is gone."""
    journal, (first, second, late) = opened()
    (daemon,) = attachments(1)
    journal.replay(daemon)
    journal.note(5, late)
    journal.replay(daemon)

    assert first.given_to == second.given_to == late.given_to == [daemon]


def test_each_daemon_is_given_all_of_it() -> None:
    journal, entries = opened()
    one, other = attachments(2)
    journal.replay(one)
    journal.note(5, entries[2])
    journal.replay(other)

    assert entries[0].given_to == [one, other]
    assert entries[2].given_to == [other]


def test_what_was_refused_or_committed_is_not_given_again() -> None:
    journal, (first, second, late) = opened()
    (daemon,) = attachments(1)
    journal.remove(first)
    journal.replay(daemon)
    journal.remove(second)
    journal.note(5, late)
    journal.replay(daemon)
    # Step 4 is an earlier commit than the one under way, so nothing changes.
    journal.acknowledge(4)
    journal.acknowledge(5)
    journal.replay(daemon)

    assert (first.given_to, second.given_to, late.given_to) == ([], [daemon], [daemon])
    assert journal.acknowledged == 5 and journal.step is None


def test_before_it_is_opened_nothing_is_kept() -> None:
    journal, entry = Journal(), Entry()
    journal.note(0, entry)
    journal.replay(attachments(1)[0])

    assert entry.given_to == []


def test_what_only_the_training_thread_can_make_is_given_by_it_in_order() -> None:
    journal, (first, second, late) = opened()
    (daemon,) = attachments(1)
    journal.remove(second)
    made: list[str] = []

    def make() -> list[Value]:
        made.append("derived")
        raise StoreUnavailableError(grpc.StatusCode.UNAVAILABLE, "the daemon is gone again")

    journal.note(5, Derived(step=5, values=make))
    journal.note(5, late)
    assert not journal.replay(daemon)
    assert (first.given_to, late.given_to, made) == ([daemon], [], [])
    with pytest.raises(StoreUnavailableError):
        journal.replay(daemon, derives=True)
    assert (first.given_to, late.given_to, made) == ([daemon], [], ["derived"])


def test_declarations_are_given_first_and_once_to_each_daemon() -> None:
    journal, (first, *_) = opened()
    one, other = attachments(2)
    registered, begun = Entry(), Entry()
    journal.registered, journal.layout_begun = cast(Any, registered), cast(Any, begun)
    for daemon in (one, one, other):
        assert journal.replay(daemon)
    journal.acknowledge(5)
    (third,) = attachments(1)
    journal.replay(third)

    # The layout has its first commit then.
    assert begun.given_to == first.given_to == [one, other]
    assert registered.given_to == [one, other, third]


def test_the_copy_that_a_commit_under_way_needs_is_not_overwritten_by_the_next_step() -> None:
    journal, _ = opened()
    journal.acknowledge(5)
    journal.open(most_bytes=16, durable_every=1)
    first = journal.keep("a", torch.full((8,), 1, dtype=torch.uint8))
    assert first is not None
    journal.note(6, Entry())
    second = journal.keep("a", torch.full((8,), 2, dtype=torch.uint8))
    assert second is not None
    assert first.unique().tolist() == [1] and second.unique().tolist() == [2]
    journal.acknowledge(6)
    third = journal.keep("a", torch.full((8,), 3, dtype=torch.uint8))
    assert third is second, "the memory is used again as soon as the commit is there"


def test_copies_that_are_too_large_are_all_dropped() -> None:
    journal, _ = opened()
    journal.open(most_bytes=16, durable_every=1)
    assert journal.keep("a", torch.zeros(12, dtype=torch.uint8)) is not None
    assert journal.keep("b", torch.zeros(12, dtype=torch.uint8)) is None
    assert journal.kept_bytes == 0 and journal.keep("a", torch.zeros(12, dtype=torch.uint8)) is None


@pytest.mark.parametrize(
    ("durable_every", "useful"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 5, 6]), (0, [])], ids=["step", "3", "none"]
)
def test_gradients_are_copied_only_if_the_next_daemon_may_have_the_commit_before(
    durable_every: int, useful: list[int]
) -> None:
    """Commit 5 is the first one of a layout, which is durable where any commit is."""
    journal = Journal()
    journal.open(most_bytes=1 << 20, durable_every=durable_every)
    found = []
    for step in range(7):
        journal.acknowledged = step
        if step == 5:
            journal.note_durable(step)
        if journal.keep("a", torch.zeros(12, dtype=torch.uint8)) is not None:
            found.append(step)
    assert found == useful


def test_no_gradient_is_copied_where_those_of_a_step_are_known_to_be_too_large(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fits, exceeds = Journal(), Journal()
    with caplog.at_level("INFO"):
        for journal, nbytes in ((fits, 100), (exceeds, 101)):
            journal.open(most_bytes=100, durable_every=1)
            journal.expect_gradients(nbytes)
    assert [record.getMessage() for record in caplog.records] == [
        "this rank has more bytes of gradients than paramserver.kept_gradients = 100: if the daemon is lost while a "
        "commit is under way, the run has to be restarted"
    ]
    assert fits.keep("a", torch.zeros(12, dtype=torch.uint8)) is not None
    assert exceeds.keep("a", torch.zeros(12, dtype=torch.uint8)) is None
    assert exceeds.kept_bytes == 0


def test_the_commit_that_a_run_goes_on_from_may_be_durable() -> None:
    journal = Journal()
    journal.open(most_bytes=1 << 20, durable_every=4)
    journal.go_on_from(7)
    assert journal.is_useful
    journal.acknowledged = 9
    assert not journal.is_useful


def test_gradients_before_the_first_commit_are_copied_although_no_commit_is_durable() -> None:
    journal = Journal()
    journal.open(most_bytes=1 << 20, durable_every=0)
    assert journal.is_useful, "the next daemon begins as this one did, without a commit"


def test_a_gradient_that_is_parked_before_a_vote_is_answered_belongs_to_the_step_after_it() -> None:
    journal, (daemon,) = Journal(), attachments(1)
    journal.open(most_bytes=1 << 20, durable_every=2)
    journal.acknowledged = 1
    assert not journal.is_useful
    journal.vote = JournaledVote(step=2, client_state=b"", settled=1, attachment=daemon, call=Future())
    assert journal.is_useful, "commit 2 will be durable"


def test_a_step_without_updates_keeps_the_values_that_were_handed_over_for_it() -> None:
    """No parameter of this rank was updated, and its gradients would be too large to keep if there were any."""
    journal, entries = opened()
    journal.expect_gradients(1)
    (daemon,) = attachments(1)
    assert journal.note_update(5, [], []) is not None
    journal.remove(journal._entries[-1])
    journal.replay(daemon)

    assert entries[0].given_to == entries[1].given_to == [daemon]
    assert not journal.state.lacks_bytes


def test_a_rank_hands_nothing_over_between_its_vote_and_the_commit() -> None:
    journal, entries = opened()
    journal.state = JournalState.VOTED
    with pytest.raises(RuntimeError, match="a journal that is VOTED cannot NOTE"):
        journal.note(5, entries[2])
