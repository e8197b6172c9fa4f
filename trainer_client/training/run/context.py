"""The records that `initialize` makes before there is an engine.

They are the user's objects, this rank's connections, and what is given back at the engine's end.

This module owns nothing. It has no functions: the job and the assembly of the engine read these records.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from trainer_client.base.log_context import LogContext
from trainer_client.base.recorder import Recorder
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.training_config import TrainingConfig
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.data_loader import TrainingLoader
from trainer_client.training.run.job_place import JobPlace
from trainer_client.training.run.run_state import Scheduler
from trainer_client.training.store_optimizer import StoreOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class UserObjects:
    """The objects that the user has passed to `initialize`, or that `initialize` has made from the arguments.

    Attributes:
        parameters: the parameters of `module`, in the model's order.
        data: the loader whose place in the data is in every commit; None: the user loads data without the engine.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The exit stacks that end an engine: its session, process groups, threads and share of a daemon.

    Attributes:
        all: the stack with all of these. The engine closes it at its end, and it closes `apart` last.
        apart: the part that refers neither to the engine nor to its model, such as the session with the store. For an
            engine that the program has forgotten, only this part is closed; see forgotten.py.
    """

    all: ExitStack
    apart: ExitStack
