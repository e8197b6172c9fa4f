"""Two records that `initialize` makes before there is an engine: the user's objects, and this rank's connections.

This module owns nothing. It has no functions: the job and the assembly of the engine read these records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from trainer_client.config.training_config import TrainingConfig
from trainer_client.log_context import LogContext
from trainer_client.model.parameters import ModelParameter
from trainer_client.ranks.collectives import Collectives
from trainer_client.recorder import Recorder
from trainer_client.run.data_loader import TrainingLoader
from trainer_client.run.job_place import JobPlace
from trainer_client.run.run_state import Scheduler
from trainer_client.store_optimizer import StoreOptimizer
from trainer_client.transport.rank_store import RankStore


@dataclass(frozen=True, slots=True, kw_only=True)
class UserObjects:
    """The objects that the user has passed to `initialize`, or that `initialize` has made from the arguments.

    Attributes:
        parameters: the parameters of `module`, in the model's order.
        data: the loader whose cursor is in every commit; None: the user loads data without the engine.
    """

    module: nn.Module
    parameters: Sequence[ModelParameter]
    optimizer: StoreOptimizer
    lr_scheduler: Scheduler | None
    data: TrainingLoader | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """This rank's number and device, and its connections to the store and to the other ranks."""

    settings: TrainingConfig
    place: JobPlace
    local_rank: int
    collectives: Collectives
    store: RankStore
    recorder: Recorder
    log_context: LogContext
