"""Handing entries of the journal to the store, and to the next daemon if this one is lost during the call."""

from __future__ import annotations

from trainer_client.client.transport.attachment import Attachment
from trainer_client.client.transport.attachments import Attachments
from trainer_client.client.transport.journal import HandOver
from trainer_client.errors import StoreError


def hand_over(attachments: Attachments, step: int, entry: HandOver, noted: HandOver) -> None:
    """Hand `entry` to the store, and add `noted` to the journal.

    If this daemon is lost, the next one is handed `noted` instead of `entry`.

    Raises:
        StoreError: the store refuses `entry`, or no next daemon came in time.
    """
    with attachments.changed:
        at = attachments.current
        attachments.journal.note(step, noted)
    try:
        entry.make(at)
    except StoreError as error:
        outlive(attachments, at, error, noted)


def outlive(attachments: Attachments, at: Attachment, error: StoreError, entry: HandOver | None) -> None:
    """Wait for the attachment that replaces `at`, on which a call has failed with `error`.

    Raises:
        StoreError: the store has refused `entry`, which is then removed from the journal, or no next daemon came.
    """
    try:
        attachments.outlive(at, error)
    except StoreError:
        with attachments.changed:
            attachments.journal.remove(entry)
        raise
