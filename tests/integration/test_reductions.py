"""Gradients of several ranks: read before they are reduced, and reduced once for several passes."""

from __future__ import annotations

from tests.integration.support.ranks import run_ranks


def test_gradients_are_those_of_plain_pytorch_however_they_are_reduced(model_store: str) -> None:
    run_ranks("tests.integration.support.reduction_ranks", 2, model_store)
