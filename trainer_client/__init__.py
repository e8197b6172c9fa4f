"""The libraries of paramserver: a training engine with DeepSpeed's interface, and a client for other programs.

Both use a store daemon, which owns the parameters and the optimizer states.
"""

from __future__ import annotations

from trainer_client.own_packages import check_own_packages

check_own_packages()

from trainer_client import utils, zero
from trainer_client.access import StateShard
from trainer_client.engine import Engine
from trainer_client.errors import (
    ClientStateError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    DaemonRestartedError,
    DataLossError,
    DeferredInitError,
    InvalidRequestError,
    JobConflictError,
    LocalDaemonError,
    NonFiniteGradientError,
    PermissionDeniedError,
    PhaseError,
    RankMismatchError,
    ReleasedParameterError,
    SessionEndedError,
    StepAbortedError,
    StoreBudgetError,
    StoreError,
    StoreNotFoundError,
    StoreTimeoutError,
    StoreUnavailableError,
    TrainerClientError,
    UnauthenticatedError,
)
from trainer_client.initialization import initialize
from trainer_client.optimizers.lion import Lion
from trainer_client.report.step_report import StepReport
from trainer_client.run.data_loader import TrainingLoader
from trainer_client.store_client.client import StoreClient, StoreReader, StoreWriter
from trainer_client.store_client.client_sync import StoreClientSync
from trainer_client.store_client.reader import StoreReaderSync
from trainer_client.store_client.types import Commit, Kind, Placement, StoredJob, StoredTensor, TensorSpec
from trainer_client.store_client.writer import StoreWriterSync
from trainer_client.store_optimizer import StoreOptimizer
from trainer_client.transport.credentials import Credentials

__all__ = [
    "ClientStateError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Commit",
    "ConfigError",
    "Credentials",
    "DaemonRestartedError",
    "DataLossError",
    "DeferredInitError",
    "Engine",
    "InvalidRequestError",
    "JobConflictError",
    "Kind",
    "Lion",
    "LocalDaemonError",
    "NonFiniteGradientError",
    "PermissionDeniedError",
    "PhaseError",
    "Placement",
    "RankMismatchError",
    "ReleasedParameterError",
    "SessionEndedError",
    "StateShard",
    "StepAbortedError",
    "StepReport",
    "StoreBudgetError",
    "StoreClient",
    "StoreClientSync",
    "StoreError",
    "StoreNotFoundError",
    "StoreOptimizer",
    "StoreReader",
    "StoreReaderSync",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "StoreWriter",
    "StoreWriterSync",
    "StoredJob",
    "StoredTensor",
    "TensorSpec",
    "TrainerClientError",
    "TrainingLoader",
    "UnauthenticatedError",
    "initialize",
    "utils",
    "zero",
]
