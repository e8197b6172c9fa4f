"""The number of threads with which a daemon updates by default."""

from __future__ import annotations

import pytest

from paramserver.contract.optimizer_threads import by_default


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (32, 16), (192, 16)])
def test_half_of_the_processors_up_to_a_limit(processors: int, threads: int) -> None:
    assert by_default(processors) == threads
