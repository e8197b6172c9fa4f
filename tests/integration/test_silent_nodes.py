"""Ranks on three nodes, which are network namespaces, when a link is cut, cut in one direction, or slow.

There is no daemon, and the ranks' key-value store is on the first node."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.namespaces import cut, mute, shape, switched, why_not_switched
from paramserver.contract import silence
from tests.integration.support.ranks import Launch
from tests.integration.support.waiting import wait_until

pytestmark = pytest.mark.skipif(why_not_switched() is not None, reason=f"no namespaces: {why_not_switched()}")

HOSTS = ("10.94.7.1", "10.94.7.2", "10.94.7.3")
SILENT_SECONDS = 4.0
# The ranks end long before the time-out of their collectives, which is 600 s, also on busy cores.
END_SECONDS = 90.0
# The strikes, each with the number of the node that is hit, and the collective that the ranks are in. The first node
# has the key-value store.
CASES: Mapping[str, tuple[int, str]] = {
    "cut": (2, "flags"),
    "cut-from-the-first": (0, "gather"),
    "mute": (1, "reduction"),
    "deaf": (1, "reduction"),
    "cut-at-the-end": (2, "end"),
    "cut-in-a-wait": (2, "wait"),
    "slow-and-busy": (1, "flags"),
}


def strike(kind: str, number: int, namespaces: Sequence[str], directory: Path) -> None:
    others = [place for place in range(len(HOSTS)) if place != number]
    match kind:
        case "mute":
            mute(namespaces[number], [HOSTS[place] for place in others])
        case "deaf":
            for place in others:
                mute(namespaces[place], [HOSTS[number]])
        case "slow-and-busy":
            assert shape([namespaces[number]], 0.0001, burst="16kb") is None
            (directory / "busy").touch()
        case _:
            cut(namespaces[number])


def play(kind: str, directory: Path, busy_seconds: float | None) -> list[dict[str, Any]]:
    """Have ranks meet, strike, and return how each of them ended."""
    is_long = busy_seconds is not None and kind.startswith("slow")
    silent_seconds = silence.RANK_SECONDS if is_long else SILENT_SECONDS
    with (
        switched(HOSTS) as namespaces,
        Launch(
            "tests.integration.support.silent_ranks",
            len(HOSTS),
            (directory, str(silent_seconds), CASES[kind][1]),
            directory,
            namespaces=namespaces,
            master=HOSTS[0],
        ) as launch,
    ):
        wait_until(lambda: len(list(directory.glob("begun-*"))) == len(HOSTS) or not launch.is_whole, seconds=60)
        strike(kind, CASES[kind][0], namespaces, directory)
        if kind.startswith("slow"):
            end = time.monotonic() + (busy_seconds or 3 * SILENT_SECONDS)
            wait_until(lambda: time.monotonic() > end or not launch.is_whole, seconds=2 * (end - time.monotonic()))
            (directory / "end").touch()
        codes = launch.wait(END_SECONDS)
        assert codes == [0] * len(HOSTS), launch.output()
        return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(len(HOSTS))]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, list[dict[str, Any]]]:
    """How each rank of each case ended; the cases run at the same time, because they mostly wait."""
    directories = [tmp_path_factory.mktemp(kind) for kind in CASES]
    seconds = repeat(pytestconfig.getoption("busy_seconds"))
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(play, CASES, directories, seconds), strict=True))


@pytest.mark.parametrize("kind", [kind for kind in CASES if not kind.startswith("slow")])
def test_all_ranks_end_soon_when_a_link_is_cut_in_any_direction(
    ended: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    for rank in ended[kind]:
        assert "failed, another rank has gone or given up" in rank["text"]
        assert " is silent: it has not answered rank " in rank["text"]
        assert rank["seconds"] < END_SECONDS
        assert rank["closing"] < END_SECONDS


def test_a_slow_link_and_busy_cores_make_no_rank_silent(ended: dict[str, list[dict[str, Any]]]) -> None:
    assert [rank["text"] for rank in ended["slow-and-busy"]] == ["", "", ""]
