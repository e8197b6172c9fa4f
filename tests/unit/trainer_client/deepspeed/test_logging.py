"""The logger of scripts: some ranks write, some only once."""

from __future__ import annotations

import logging

import pytest

from trainer_client import comm
from trainer_client.deepspeed.logging import (
    get_current_level,
    log_dist,
    log_dist_once,
    logger,
    print_dist,
    set_log_level_from_string,
    should_log_le,
    warning_once,
)


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "is_initialized", lambda: True)
    monkeypatch.setattr(comm, "get_rank", lambda: 1)


@pytest.mark.usefixtures("rank_1")
def test_a_line_is_written_by_the_ranks_that_are_named(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, logger="DeepSpeed")
    for ranks in (None, [0], [0, 1], [-1]):
        log_dist(f"to {ranks}", ranks)
    print_dist("printed", [1])
    print_dist("not printed", [0])

    assert [record.getMessage() for record in caplog.records] == ["[Rank 1] to [0, 1]", "[Rank 1] to [-1]"]
    assert capsys.readouterr().out == "[Rank 1] printed\n"


def test_before_the_ranks_have_met_each_writes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="DeepSpeed")
    for _ in range(2):
        log_dist_once("once", [0])
        warning_once("take care")

    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "[Rank -1] once"),
        ("WARNING", "take care"),
    ]


def test_levels_are_set_by_name() -> None:
    before = logger.level
    try:
        set_log_level_from_string("ERROR")
        assert get_current_level() == logging.ERROR
        assert should_log_le("critical")
        assert not should_log_le("info")
        with pytest.raises(ValueError, match="'loud': write one of debug"):
            set_log_level_from_string("loud")
    finally:
        logger.setLevel(before)
