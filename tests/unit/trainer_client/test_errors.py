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


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickle(kind: type[Exception]) -> None:
    """A pool of processes hangs if the error of a worker cannot be read from its pickle."""
    arguments: dict[type[Exception], tuple[object, ...]] = {
        errors.ReleasedParameterError: ("fc.weight", "linear"),
        errors.TiledParameterError: ("fc.weight", "linear"),
    }
    default = (grpc.StatusCode.NOT_FOUND, "no job") if issubclass(kind, errors.StoreError) else ("the message",)
    error = kind(*arguments.get(kind, default))

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is kind and str(copy) == str(error) and vars(copy) == vars(error)
