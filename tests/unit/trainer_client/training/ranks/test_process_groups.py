"""A wait for a device ends in any case, also at world size 1, where there is no process group."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_client.base.recorder import Recorder
from trainer_client.training.ranks import process_groups as module
from trainer_client.training.ranks.process_groups import ProcessGroups


def alone_for(timeout_seconds: float) -> ProcessGroups:
    """Return the process groups of a single rank, whose waits have this time-out."""
    return ProcessGroups(torch.device("cpu"), timeout_seconds, Recorder())


def test_a_wait_for_a_device_ends_when_the_device_is_done() -> None:
    alone = alone_for(60.0)
    answers = iter([False, False, True])

    alone._wait_until(lambda: next(answers))

    assert next(answers, None) is None


def test_a_wait_for_a_device_ends_with_the_time_out() -> None:
    alone = alone_for(0.02)

    with pytest.raises(RuntimeError, match="the device still waits for other ranks"):
        alone._wait_until(lambda: False)


def test_a_wait_ends_when_a_rank_has_gone_and_a_little_later_when_one_has_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_UNDER_WAY_SECONDS", 0.05)
    gone, closed = (alone_for(60.0) for _ in range(2))
    gone.rank_has_gone("rank 3 has gone", is_closed=False)
    # Only the first rank that goes is the reason.
    gone.rank_has_gone("rank 2 has gone", is_closed=False)
    with pytest.raises(RuntimeError, match="rank 3 has gone"):
        gone._wait_until(lambda: False)

    begun = time.monotonic()
    closed.rank_has_gone("rank 1 has closed", is_closed=True)
    with pytest.raises(RuntimeError, match="rank 1 has closed"):
        closed._wait_until(lambda: False)
    assert time.monotonic() - begun >= 0.05


@pytest.mark.parametrize(("is_closed", "delay"), [(False, 0.0), (True, 0.05)])
def test_what_a_device_has_under_way_is_aborted_when_a_rank_has_gone(
    is_closed: bool, delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that trains may wait for the device in torch, where it looks at nothing else."""
    monkeypatch.setattr(module, "_UNDER_WAY_SECONDS", 0.05)
    aborted: list[float] = []
    gloo = SimpleNamespace(abort=lambda: pytest.fail("the hosts' groups are ended by gloo"))
    communicator = SimpleNamespace(abort=lambda: aborted.append(time.monotonic()))
    ranks = ProcessGroups(torch.device("cuda", 0), 60.0, Recorder())
    groups: Any = [gloo, gloo, communicator, communicator]
    ranks._groups = groups

    begun = time.monotonic()
    ranks.rank_has_gone("rank 1", is_closed=is_closed)
    ranks.rank_has_gone("rank 2", is_closed=False)
    while not aborted and time.monotonic() - begun < 10:
        time.sleep(0.005)

    assert len(aborted) == 1
    assert aborted[0] - begun >= delay
