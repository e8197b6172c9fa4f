"""An early update is undone once, and removed when its step takes it or the store has lost it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from trainer_client.client.transport.gradient_leases import GradientLeases
from trainer_client.client.transport.journal import GroupUpdate
from trainer_client.errors import PhaseError
from trainer_client.training.step.early_updates import EarlyUpdates


class Accepted:
    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def wait(self) -> bool:
        return self._answer


class Store:
    """A store that answers that it has each update, or that it has lost it, and records which updates are withdrawn."""

    def __init__(self, *, accepts: bool) -> None:
        self.withdrawn: list[tuple[int, list[str]]] = []
        self._accepts = accepts

    def start_updates(self, step: int, table: Any, updates: Any, *, final: bool) -> Accepted:
        return Accepted(self._accepts)

    def withdraw_updates(self, step: int, groups: list[str]) -> None:
        self.withdrawn.append((step, groups))


def begin(store: Store, *, are_final: bool = False) -> EarlyUpdates:
    early = EarlyUpdates(cast(GradientLeases, store), are_final=are_final)
    update = GroupUpdate(group="a[0:8]", gradient=cast(Any, None), scale=1.0, hyper_parameters_of_shard=[-1])
    early.begin(3, update, [], [None])
    return early


def test_a_withdrawal_reaches_the_store_once() -> None:
    early = begin(store := Store(accepts=True))
    early.withdraw("b[0:8]")
    assert store.withdrawn == []

    early.withdraw("a[0:8]")
    early.withdraw("a[0:8]")
    assert store.withdrawn == [(3, ["a[0:8]"])]
    assert early.find("a[0:8]") is None
    assert (early.begun, early.withdrawn) == (1, 1)


def test_a_forgotten_update_is_not_withdrawn() -> None:
    early = begin(store := Store(accepts=True))
    assert early.find("a[0:8]") is not None
    early.remove("a[0:8]")
    early.withdraw("a[0:8]")
    assert store.withdrawn == []


@pytest.mark.parametrize("asks", [True, False])
def test_an_update_that_the_store_has_lost_is_no_longer_there(asks: bool) -> None:
    early = begin(store := Store(accepts=False))
    if asks:
        assert early.find("a[0:8]") is None
    early.withdraw("a[0:8]")
    assert store.withdrawn == [], "the next daemon knows nothing of it"
    assert early.find("a[0:8]") is None


def test_a_final_update_is_not_made_again_but_may_be_undone() -> None:
    early = begin(store := Store(accepts=True), are_final=True)
    early.require_revisable("another group changes", "b[0:8]")
    for group in ("a[0:8]", None):
        with pytest.raises(PhaseError, match=r'a rate changes, but .*early_updates is "final"'):
            early.require_revisable("a rate changes", group)
    early.withdraw_all()
    assert store.withdrawn == [(3, ["a[0:8]"])]
    early.require_revisable("the next step begins")
