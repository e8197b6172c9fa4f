"""Errors reach the process that started a rank, and their tracebacks end in one error."""

from __future__ import annotations

import ast
import inspect
import logging
import pickle
import traceback
from pathlib import Path

import grpc
import pytest

from trainer_client import errors

PACKAGE = Path(errors.__file__).parent
# These run the user's own code or model, whose errors are of any class. The lines of that code stay in the traceback.
OF_USERS = ("plan/model.py", "plan/model_inputs.py", "plan/probe.py", "plan/rehearsal.py")

CLASSES = [
    each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, errors.TrainerClientError)
]
# The arguments of each class with arguments of its own, which its subclasses take as well.
ARGUMENTS: dict[type, tuple[object, ...]] = {
    errors.TrainerClientError: ("the message",),
    errors.ParameterUseError: ("fc.weight", "linear"),
    errors.StoreError: (grpc.StatusCode.NOT_FOUND, "no job"),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickle(kind: type[Exception]) -> None:
    """A pool of processes hangs if the error of a worker cannot be read from its pickle."""
    error = kind(*ARGUMENTS[next(base for base in kind.__mro__ if base in ARGUMENTS)])

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind and str(copy) == str(error) and vars(copy) == vars(error)


def _catches_any(handler: ast.ExceptHandler) -> bool:
    """Return whether the handler catches errors of any class, as code that runs a user's function does."""
    return any(isinstance(node, ast.Name) and node.id == "Exception" for node in ast.walk(handler.type or handler))


def test_an_error_is_raised_without_what_led_to_it_but_for_what_a_users_code_raised() -> None:
    chained = {
        (str(path.relative_to(PACKAGE)), node.lineno, _catches_any(handler))
        for path in PACKAGE.rglob("*.py")
        for handler in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(handler, ast.ExceptHandler)
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise) and isinstance(node.cause, ast.Name)
    }
    assert chained, "none is found, so this test looks at nothing"
    assert [place for place in chained if place[0] not in OF_USERS or not place[2]] == []


def test_what_led_to_an_error_is_in_the_log_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        try:
            {}["key"]
        except KeyError as error:
            raise errors.ConfigError(f"there is no {error}") from None

    with caplog.at_level(logging.DEBUG, errors.__name__), pytest.raises(errors.ConfigError) as caught:
        fail()
    assert "KeyError" not in "".join(traceback.format_exception(caught.value))
    assert "KeyError: 'key'" in caplog.text
    assert isinstance(caught.value.__context__, KeyError)
