"""The libraries of paramserver: a training engine with DeepSpeed's interface, and a client for other programs.

Both use a store daemon, which owns the parameters and the optimizer states.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_client.base.own_packages import check_own_packages
from trainer_client.base.quiet_grpc import import_grpc_quietly

check_own_packages()
import_grpc_quietly()

from trainer_client.deepspeed.finder import install_finder

install_finder()

from trainer_client import checkpoint, comm, compression, moe, ops, pipe, runtime, schedules, sequence, utils, zero
from trainer_client.accelerator import get_accelerator, set_accelerator
from trainer_client.client.store_client.client import StoreClient, StoreReader, StoreWriter
from trainer_client.client.store_client.client_sync import StoreClientSync
from trainer_client.client.store_client.reader import StoreReaderSync
from trainer_client.client.store_client.types import Commit, Kind, Placement, StoredJob, StoredTensor, TensorSpec
from trainer_client.client.store_client.writer import StoreWriterSync
from trainer_client.client.transport.credentials import Credentials
from trainer_client.comm import init_distributed
from trainer_client.deepspeed import checkpointing
from trainer_client.deepspeed.config import DeepSpeedConfig
from trainer_client.deepspeed.helpers import OnDevice, add_config_arguments
from trainer_client.deepspeed.logging import log_dist, logger
from trainer_client.engine.engine import Engine
from trainer_client.engine.engine import Engine as DeepSpeedEngine
from trainer_client.errors import (
    ClientStateError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    DaemonRestartedError,
    DataLossError,
    DeferredInitError,
    ExportError,
    ForkedChildError,
    ImportCheckpointError,
    InvalidRequestError,
    JobConflictError,
    LocalDaemonError,
    NonFiniteGradientError,
    NotBuiltError,
    OtherModelError,
    PermissionDeniedError,
    PhaseError,
    RankMismatchError,
    ReleasedParameterError,
    SessionEndedError,
    StepAbortedError,
    StoreBudgetError,
    StoreDeviceError,
    StoreError,
    StoreNotFoundError,
    StoreTimeoutError,
    StoreUnavailableError,
    TiledParameterError,
    TrainerClientError,
    UnauthenticatedError,
    UnusedParameterError,
)
from trainer_client.errors import ConfigError as DeepSpeedConfigError
from trainer_client.inference import InferenceEngine, init_inference
from trainer_client.inference.faces import disk_offload, load_checkpoint_and_dispatch
from trainer_client.initialization import initialize
from trainer_client.interface_version import (
    __git_branch__,
    __git_hash__,
    __version__,
    __version_major__,
    __version_minor__,
    __version_patch__,
)
from trainer_client.optimizers.lion import Lion
from trainer_client.pipe import PipelineModule
from trainer_client.runtime.tensor_parallel import tp_model_init
from trainer_client.training.access import StateShard
from trainer_client.training.model.chunked_loss import chunked_cross_entropy
from trainer_client.training.report.step_report import StepReport
from trainer_client.training.run.data_loader import TrainingLoader
from trainer_client.training.store_optimizer import StoreOptimizer

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
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "DeferredInitError",
    "Engine",
    "ExportError",
    "ForkedChildError",
    "ImportCheckpointError",
    "InferenceEngine",
    "InvalidRequestError",
    "JobConflictError",
    "Kind",
    "Lion",
    "LocalDaemonError",
    "NonFiniteGradientError",
    "NotBuiltError",
    "OnDevice",
    "OtherModelError",
    "PermissionDeniedError",
    "PhaseError",
    "PipelineModule",
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
    "StoreDeviceError",
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
    "TiledParameterError",
    "TrainerClientError",
    "TrainingLoader",
    "UnauthenticatedError",
    "UnusedParameterError",
    "__git_branch__",
    "__git_hash__",
    "__version__",
    "__version_major__",
    "__version_minor__",
    "__version_patch__",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "chunked_cross_entropy",
    "comm",
    "compression",
    "disk_offload",
    "get_accelerator",
    "init_distributed",
    "init_inference",
    "initialize",
    "load_checkpoint_and_dispatch",
    "log_dist",
    "logger",
    "moe",
    "ops",
    "pipe",
    "runtime",
    "schedules",
    "sequence",
    "set_accelerator",
    "tp_model_init",
    "utils",
    "zero",
]

# The names of this package that need an optional package. For each name: the module of this library that defines it,
# and the optional package.
_OPTIONAL = {
    "Accelerator": ("trainer_client.accelerate.accelerator", "accelerate"),
    "ParamserverStrategy": ("trainer_client.lightning.strategy", "lightning"),
}

if TYPE_CHECKING:
    from trainer_client.accelerate.accelerator import Accelerator as Accelerator
    from trainer_client.lightning.strategy import ParamserverStrategy as ParamserverStrategy
else:

    def __getattr__(name: str) -> Any:
        """Import `Accelerator` or `ParamserverStrategy` when it is used, because each needs a package of its own.

        Raises:
            ImportError: the package is not installed.
        """
        if name not in _OPTIONAL:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, package = _OPTIONAL[name]
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            message = f"trainer_client.{name} needs {package}: pip install 'paramserver[{package}]'"
            raise ImportError(message, name=package) from None
