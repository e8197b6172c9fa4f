"""Errors of ranks that run in pools of processes reach the process that started them."""

from __future__ import annotations

import inspect
import pickle

import grpc
import pytest

from trainer_client import errors

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
