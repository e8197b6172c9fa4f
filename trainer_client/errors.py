"""The errors that the training library raises, by what the user can do about them.

Owns nothing; holds no logic. Every message names the thing (parameter, config key, path, budget), its value, and what
to do. Errors of the store keep its gRPC status code; `channel.py` is the only place that makes them.
"""

from __future__ import annotations

import grpc


class TrainerClientError(Exception):
    """Base of all errors of this library."""


class ConfigError(TrainerClientError, ValueError):
    """The config, the model or an argument of `initialize` asks for something that cannot be honoured."""


class RankMismatchError(ConfigError):
    """The ranks of a run were given different configs, models or optimizers. Every rank raises the same message, which
    says for each key which ranks have which value; nothing was started or opened."""


class DeferredInitError(TrainerClientError, RuntimeError):
    """The model's constructor does something that cannot be put off until there is memory for its tensors."""


class ClientStateError(TrainerClientError):
    """A value cannot be part of the client state that a commit carries, or a stored client state cannot be read."""


class NonFiniteGradientError(TrainerClientError):
    """As many steps in a row as the config allows were skipped: the gradients were not finite. The states are those of
    the last step that was made."""


class LocalDaemonError(TrainerClientError):
    """The store daemon that belongs to this job could not be started."""


class PhaseError(TrainerClientError, RuntimeError):
    """The engine or the model was called at a point of the step where it cannot be; the message says what to call."""


class ReleasedParameterError(TrainerClientError, RuntimeError):
    """A parameter's values were asked for while they are in the store only.

    Args:
        fqn: the parameter's name.
        function: of torch, that was handed the parameter.
    """

    def __init__(self, fqn: str, function: str) -> None:
        super().__init__(
            f"parameter {fqn} was given to {function} outside of any forward of the model: its values are in the "
            "store; read them within engine.gathered(...), or use them within a module's forward"
        )


class CollectiveError(TrainerClientError, RuntimeError):
    """Ranks could not communicate: one of them is gone, or late, or does something else. The message says where each
    rank is. Restart the job: it resumes from the last commit."""


class CollectiveTimeoutError(CollectiveError):
    """Another rank did not come to a collective within `paramserver.collective_timeout_seconds`."""


class CollectiveMismatchError(CollectiveError):
    """Ranks were about to gather different units with one another: nothing was mixed."""


class StoreError(TrainerClientError):
    """The store refused or failed a call.

    Args:
        code: the gRPC status code.
        message: what the store said.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{message} [{code.name}]")
        self.code = code
        self.message = message


class InvalidRequestError(StoreError):
    """The store refused the request as malformed, whatever its state."""


class UnauthenticatedError(StoreError):
    """The daemon asks for a token, and was given none that it knows."""


class PermissionDeniedError(StoreError):
    """The token does not allow the job or the call."""


class StoreNotFoundError(StoreError):
    """The store does not have the job, step, tensor or range that was asked for."""


class StoreUnavailableError(StoreError):
    """The daemon cannot be reached, or the session with it has ended."""


class SessionEndedError(StoreUnavailableError):
    """The store has ended the session, and all its leases are void: nothing of it can be used or finished any more."""


class DaemonRestartedError(StoreUnavailableError):
    """Another daemon answers at the address, and the run cannot go on with it: the message says why. What was not
    committed is gone, with the session and its leases."""


class StoreTimeoutError(StoreError):
    """The deadline passed while the store waited for bytes, budget or other ranks."""


class StoreBudgetError(StoreError):
    """A byte budget or a disk of the store is full."""


class JobConflictError(StoreError):
    """The job exists with another layout, another run holds it, or its resume policy forbids to go on."""


class StepAbortedError(StoreError):
    """The step was abandoned: a rank died or a roll-back came. Start again; the last committed step is intact."""


class DataLossError(StoreError):
    """Stored bytes are damaged."""
