"""The daemon's log of a failure says where it happened, and never shows the values of variables."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import grpc.aio
import pytest

from paramserver.process.logs import configure_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restore the handlers and the level of the tests' own logging after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


def fail_with(token: str) -> None:
    raise ValueError(f"{len(token)} characters")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_stack_shows_no_variables(capsys: pytest.CaptureFixture[str], log_format: str) -> None:
    configure_logging("info", log_format)
    try:
        fail_with("sec" + "ret")
    except ValueError:
        logging.getLogger("paramserver").exception("a request failed")
    written = capsys.readouterr().err
    assert "fail_with" in written and "6 characters" in written
    assert "secret" not in written


def test_a_client_that_goes_while_it_is_answered_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "console")
    for error in (grpc.aio.InternalError("the batch failed"), ValueError("the method failed")):
        try:
            raise error
        except Exception:
            logging.getLogger("grpc._cython.cygrpc").exception("raised by a method")
    written = capsys.readouterr().err
    assert "the method failed" in written
    assert "the batch failed" not in written
