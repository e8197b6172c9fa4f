"""The errors that the training library raises, one class for each kind of remedy.

This module owns nothing. Every message names the thing (parameter, config key, path, budget), its value, and the
remedy, and tells what led to the error. So the code that raises one writes `from None`, and a user's traceback ends in
one error. What led to it stays its `__context__`, and goes to the log at level debug. Errors of the store keep its gRPC
status code; `client/transport/channel.py` makes them from gRPC's errors.
"""

from __future__ import annotations

import logging
import sys
from typing import ClassVar, Self

import grpc

log = logging.getLogger(__name__)


class TrainerClientError(Exception):
    """Base of all errors of this library."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if (cause := sys.exception()) is not None:
            log.debug("what led to a %s", type(self).__name__, exc_info=cause)


class ConfigError(TrainerClientError, ValueError, AssertionError):
    """The config, the model or an argument asks for something that this library cannot honour.

    It is an AssertionError as well, because DeepSpeed checks its config and arguments with assertions.
    """


class NotBuiltError(TrainerClientError, NotImplementedError):
    """The script uses a name of DeepSpeed that this library does not have; the message says what to write instead."""


class RankMismatchError(ConfigError):
    """The ranks of a run were given different configs, models or optimizers.

    Every rank raises this with the same message, which lists for each differing key which ranks have which value.
    Nothing was started or opened.
    """


class NotScalarError(TrainerClientError, ValueError, AssertionError):
    """The loss that `backward` was given is no scalar.

    It is an AssertionError as well, because DeepSpeed's documentation names this class and scripts may expect it.
    """


class DeferredInitError(TrainerClientError, RuntimeError):
    """The model's constructor does something that `zero.Init` cannot defer until there is memory for its tensors."""


class ClientStateError(TrainerClientError):
    """A value cannot be part of the client state that a commit carries, or a stored client state cannot be read."""


class CheckpointError(TrainerClientError):
    """A checkpoint cannot be saved, found or read. What is committed in the store is intact."""


class ExportError(TrainerClientError):
    """A step cannot be written to the destination of an export. No part of the step is left there."""


class ImportCheckpointError(TrainerClientError):
    """A checkpoint is damaged, incomplete, of no known format, or not safe to load. Nothing of it is in the store."""


class CopyError(TrainerClientError):
    """A step cannot be copied to a store. The store has no part of it."""


class BackupError(TrainerClientError):
    """A backup is damaged, incomplete, of another job or none, or cannot be written. Former backups stay intact."""


class NonFiniteGradientError(TrainerClientError):
    """`paramserver.max_consecutive_skipped_steps` steps in a row were skipped, because gradients were not finite.

    The states are those of the last step that was not skipped.
    """


class UnusedParameterError(TrainerClientError, AssertionError):
    """A step has no gradient of some parameters, and `zero_optimization.ignore_unused_parameters` is false.

    The states are those before the step. It is an AssertionError as well, because DeepSpeed raises one.
    """


class LocalDaemonError(TrainerClientError):
    """The store daemon that the job itself starts could not be started."""


class PhaseError(TrainerClientError, RuntimeError, AssertionError):
    """The engine or the model was called in a wrong phase of the step; the message says what to call instead.

    It is an AssertionError as well, because DeepSpeed checks the order of calls with assertions.
    """


class ParameterUseError(TrainerClientError, RuntimeError):
    """A function of torch needs the values of a parameter that are not there; each subclass stands for one reason.

    Args:
        fqn: the parameter's name.
        function: name of torch's function.
    """

    # The end of the error's message, which each subclass sets: why the parameter's values are not there, and what to
    # do.
    _reason: ClassVar[str] = ", and its values are not there"

    def __init__(self, fqn: str, function: str) -> None:
        super().__init__(f"parameter {fqn} was given to {function}{self._reason}")
        self.fqn = fqn
        self.function = function

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Return how pickle makes this error again, because its arguments are not those of `Exception`."""
        return type(self), (self.fqn, self.function)


class ReleasedParameterError(ParameterUseError):
    """A function of torch needs the values of a parameter that is released, so that only the store has them."""

    _reason = (
        " outside of any forward of the model: its values are in the store; read them within engine.gathered(...), or "
        "use them within a module's forward (docs/models.md says which small parameters can be read without)"
    )


class InPlaceChangeError(TrainerClientError, RuntimeError):
    """The script has changed a parameter in place at stage 3, where the change is lost with the parameter's memory."""

    def __init__(self, fqn: str) -> None:
        """Make the error with its message, which names the parameters.

        Args:
            fqn: the name of the parameter, or the beginning of a list of names.
        """
        super().__init__(
            f"parameter {fqn} was changed in place while its unit was gathered, and the change would be lost, because "
            "at stage 3 this memory is given up after each use: change parameters between two steps, within `with "
            f'engine.gathered([engine.module.get_parameter("{fqn}")], modifier_rank=0), torch.no_grad():` or by '
            f'engine.set_full("{fqn}", "param", values); or train at stage 2, where changes in place count'
        )
        self.fqn = fqn

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """Return how pickle makes this error again, because its argument is not that of `Exception`."""
        return type(self), (self.fqn,)


class TakenGradientError(TrainerClientError, RuntimeError):
    """The script has used `.grad` of a parameter whose gradient the engine has taken, between backward and step."""

    def __init__(self, fqn: str) -> None:
        super().__init__(
            f"the gradient of parameter {fqn} is not in its .grad, because the engine has taken it: read it by "
            f'engine.get_full("{fqn}", "grad"), change it by engine.set_full("{fqn}", "grad", values), on every rank; '
            "call engine.clip_grad_norm_(max_norm) and engine.clip_grad_value_(limit) in place of torch.nn.utils, and "
            "zero_grad() of the engine or of the whole model in place of a module's; leave torch.amp.GradScaler out, "
            "because the engine scales the loss where the config has fp16 or torch_autocast"
        )
        self.fqn = fqn

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        """Return how pickle makes this error again, because its argument is not that of `Exception`."""
        return type(self), (self.fqn,)


class TiledParameterError(ParameterUseError):
    """A function of torch needs the values of a parameter whose tiles are gathered one after the other."""

    _reason = (
        ", and it is never whole, because paramserver.tiling cuts it into tiles: compute with it through the forward "
        "of its layer, outside of transforms of torch.func, use it within engine.gathered(...), or add its name to "
        "paramserver.tiling.exclude"
    )


class CollectiveError(TrainerClientError, RuntimeError):
    """Ranks could not communicate, because one of them is gone, is late or runs another part of the program.

    The message says which part of the program each rank runs. Restart the job; it resumes from the last commit.
    """


class CollectiveTimeoutError(CollectiveError):
    """Another rank did not take part in a collective within `paramserver.collective_timeout_seconds`."""


class CollectiveMismatchError(CollectiveError):
    """Ranks were about to gather different units in one collective. It did not begin, so no bytes were mixed."""


class StoreError(TrainerClientError):
    """The store refused or failed a call.

    Args:
        code: the gRPC status code.
        message: the text of the error, without the code.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{message} [{code.name}]")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[Self], tuple[grpc.StatusCode, str]]:
        """Return how pickle makes this error again, because its arguments are not those of `Exception`."""
        return type(self), (self.code, self.message)


class InvalidRequestError(StoreError):
    """The store refused the request because it is malformed."""


class UnauthenticatedError(StoreError):
    """The daemon requires a token, and this client sent none or one that the daemon does not know."""


class PermissionDeniedError(StoreError):
    """The client's token does not allow the call, or the call for this job."""


class StoreNotFoundError(StoreError):
    """The store does not have the job, step, tensor or range that was asked for."""


class StoreUnavailableError(StoreError):
    """The daemon cannot be reached, or the session with it has ended."""


class SessionEndedError(StoreUnavailableError):
    """The store has ended the session. All its leases are void, and what was begun in it cannot be finished."""


class DaemonRestartedError(StoreUnavailableError):
    """The daemon was restarted, and the run cannot go on with the new one for the reason that the message gives.

    What was not committed is lost, and so are the session and its leases.
    """


class ForkedChildError(StoreError):
    """An engine or a client was used in a forked child of the process that made it."""


class StoreTimeoutError(StoreError):
    """The deadline passed while the store waited for bytes, budget or other ranks."""


class StoreBudgetError(StoreError):
    """The store cannot keep the bytes of a call, because one of its byte budgets or a disk is full."""


class StoreDeviceError(StoreError):
    """A disk of the store has refused an operation, such as with an I/O error. The message has the system's words."""


class JobConflictError(StoreError):
    """The job exists with another layout, another run holds it, or the resume policy does not allow to resume it."""


class OtherModelError(JobConflictError):
    """The job holds another model: parameters with other names, or of other shapes."""


class StepAbortedError(StoreError):
    """The step was abandoned, because a rank died or rolled back. Repeat it; the last committed step is intact."""


class DataLossError(StoreError):
    """Bytes in the store are damaged: they do not have the checksum with which they were stored."""
