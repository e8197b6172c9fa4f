"""The question to other stores whether a job is new, before a checkpoint is imported as that job."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from trainer_client.client.transport.credentials import NO_CREDENTIALS
from trainer_client.errors import JobConflictError, StoreUnavailableError
from trainer_client.exchange import first_import
from trainer_client.training.run.stored_step import StoreAddress

# The steps of the jobs at each address; the daemon at any other address does not answer.
STORES: Mapping[str, Mapping[str, int | None]] = {
    "empty": {"mine": None, "another": 7, "mine too@replica-0": 7},
    "replica": {"mine": 3},
    "replica of a part": {"mine@replica-1": 3},
}


def _connect(store: StoreAddress, credentials: object) -> Any:
    if store.address not in STORES:
        raise StoreUnavailableError(grpc.StatusCode.UNAVAILABLE, "no answer")
    jobs = [SimpleNamespace(name=name, newest=step) for name, step in STORES[store.address].items()]
    return nullcontext(SimpleNamespace(list_jobs=lambda: jobs))


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ([], False),
        (["empty"], False),
        (["empty", "replica"], True),
        (["replica of a part"], True),
        (["away", "replica"], True),
    ],
)
def test_a_job_is_new_if_no_store_has_a_step_or_a_replica(
    addresses: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_import, "connect", _connect)
    assert first_import._any_has_steps(addresses, "mine", NO_CREDENTIALS) is expected


def test_a_store_that_does_not_answer_may_have_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_import, "connect", _connect)
    with pytest.raises(JobConflictError, match=r"'mine' is not begun .* \(away: no answer .*remove their addresses"):
        first_import._any_has_steps(["empty", "away"], "mine", NO_CREDENTIALS)
