"""The table of silence is the same in the docstring and on the page, and has the times of the code."""

from __future__ import annotations

from pathlib import Path

from paramserver.config import DaemonConfig
from paramserver.contract import silence
from trainer_client.config.paramserver import ParamserverSection

PAGE = Path(__file__).parents[4] / "docs" / "silence.md"


def rows(text: str | None) -> list[list[str]]:
    lines = [line for line in (text or "").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_page_has_the_table_of_the_docstring() -> None:
    assert rows(PAGE.read_text()) == rows(silence.__doc__)


def test_the_table_has_the_times_of_the_settings() -> None:
    table = rows(silence.__doc__)
    training, answer = ParamserverSection(), silence.ANSWER_SECONDS
    ping = silence.PING_SECONDS + answer
    heartbeat = f"{DaemonConfig.model_fields['heartbeat_timeout_seconds'].default:g}"
    reattach, rank = f"{training.reattach_timeout_seconds:g}", silence.RANK_SECONDS
    times = {
        "daemon": [f"< {ping} s", f"{ping} to {reattach} s", f"> {reattach} s"],
        "trainer alone": [f"< {heartbeat} s", f">= {heartbeat} s"],
        "trainer beside others": [f"< {heartbeat} s", f">= {heartbeat} s"],
        "link to the daemon": [f"< {heartbeat} s", f">= {heartbeat} s"],
        "node, link of nodes": [f"< {rank:g} s", f">= {rank:g} s"],
    }

    assert {who: [row[1] for row in table if row[0] == who] for who in times} == times
    said = {row[2] for row in table[2:]}
    assert said == {
        "not said",
        f"its ranks, after {answer} to {ping} s",
        f"its ranks, after {reattach} s",
        f"the daemon, after {heartbeat} s",
        f"its peers, after {rank:g} to {rank + 2:g} s",
    }
    # A session whose daemon was silent must still be there when its rank looks.
    assert ping < float(heartbeat)
