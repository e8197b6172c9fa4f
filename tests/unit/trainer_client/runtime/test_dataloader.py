"""A repeating loader begins its loader again."""

from __future__ import annotations

from itertools import islice

import pytest

from trainer_client.utils import RepeatingLoader


def test_it_begins_again_at_the_end() -> None:
    assert list(islice(RepeatingLoader([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]


def test_an_empty_loader_ends() -> None:
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))
