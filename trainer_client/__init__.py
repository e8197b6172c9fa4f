"""paramserver's training library: DeepSpeed's `initialize` over a store that owns parameters and optimizer states."""

from __future__ import annotations

from trainer_client.engine import Engine
from trainer_client.errors import (
    ClientStateError,
    ConfigError,
    DataLossError,
    JobConflictError,
    LocalDaemonError,
    StepAbortedError,
    StoreBudgetError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    TrainerClientError,
)
from trainer_client.initialization import initialize
from trainer_client.optimizer import StoreOptimizer

__all__ = [
    "ClientStateError",
    "ConfigError",
    "DataLossError",
    "Engine",
    "JobConflictError",
    "LocalDaemonError",
    "StepAbortedError",
    "StoreBudgetError",
    "StoreError",
    "StoreOptimizer",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "TrainerClientError",
    "initialize",
]
