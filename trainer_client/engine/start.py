"""The start of an engine with an optimizer. If a part of the start fails, all earlier parts are undone.

The ranks join their process groups, find or start a daemon, and open a session and the job. Then assembly.py makes the
engine. This module owns this order. It must never leave a daemon, a session or a process group behind after an error.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from paramserver.contract.bearer import TraceParent
from trainer_client.base.log_context import LogContext
from trainer_client.base.log_context import begin as begin_log_context
from trainer_client.base.recorder import Recorder
from trainer_client.base.section import Agreement
from trainer_client.client.transport.attachments import Survival
from trainer_client.client.transport.credentials import Credentials
from trainer_client.client.transport.pinning import driver_of
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.batch_sizes import BatchSizes, resolve_batch_sizes
from trainer_client.config.log_lines import describe_automatic, describe_clipping, describe_without_effect
from trainer_client.config.training_config import TrainingConfig
from trainer_client.engine.assembly import make_engine
from trainer_client.engine.engine import Engine
from trainer_client.exchange.first_import import import_at_start
from trainer_client.schedules.schedule import ScheduleSection
from trainer_client.training.initial.initial_values import InitialValues
from trainer_client.training.initial.loading import Weights
from trainer_client.training.initial.module_init import ParamInitFn
from trainer_client.training.model.buffers import cast_buffers
from trainer_client.training.model.parameters import ModelParameter
from trainer_client.training.model.unit_policy import UnitPolicy
from trainer_client.training.ranks.agreement import Declaration, require_agreement
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.context import RankContext, Resources, UserObjects
from trainer_client.training.run.data_loader import TrainingLoader, make_loader
from trainer_client.training.run.former_starts import remove_former_starts
from trainer_client.training.run.job import Job
from trainer_client.training.run.job_choice import choose_job, naming_open_engines
from trainer_client.training.run.job_place import JobPlace
from trainer_client.training.run.node_store import find_store, join_ranks
from trainer_client.training.run.run_state import Scheduler
from trainer_client.training.step.precision import PrecisionPolicy
from trainer_client.training.store_optimizer import StoreOptimizer

log = logging.getLogger(__name__)

SchedulerArgument = LRScheduler | Callable[[torch.optim.Optimizer], Scheduler] | None


@dataclass(frozen=True, slots=True)
class InitialArguments:
    """The arguments of `initialize` that name the values with which a new job begins.

    Attributes:
        weights, strict_weights, param_init_fn: see `initialize`.
        former_engines: the open engines of earlier calls of `initialize` that have parameters of this model.
    """

    weights: str | Path | None = None
    strict_weights: bool = True
    param_init_fn: ParamInitFn | None = None
    former_engines: Sequence[Engine] = ()

    def take_over(self) -> None:
        """Make the model a plain torch module with its weights again, and close the former engines.

        All ranks must call this. Call it when the new engine shares the process group and the daemon with the former
        engines already, so that the end of the former engines leaves both open.
        """
        for engine in self.former_engines:
            engine.hand_over_model()

    def values(
        self,
        model: nn.Module,
        parameters: Sequence[ModelParameter],
        collectives: Collectives,
        *,
        are_rounded: bool = False,
    ) -> InitialValues:
        """Return the initial values of a model. All ranks must call this.

        Args:
            are_rounded: whether the values are rounded to the dtype in which the model computes.
        """
        return InitialValues(
            model,
            parameters,
            collectives,
            param_init_fn=self.param_init_fn,
            weights=None if self.weights is None else Weights(self.weights),
            strict_weights=self.strict_weights,
            are_rounded=are_rounded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """The start of one engine: `initialize` makes this object from its arguments, and calls `open_engine`.

    The other attributes are objects that each rank makes by itself, without communication.

    Attributes:
        parameters: the parameters of `model`, in the model's order.
        policy: chooses the units of the model.
        optimizer: the optimizer over the store.
        scheduler: the schedule of the optimizer's learning rates, if there is one.
        initial: the source of a new job's initial values.
        training_data, collate_fn, lr_scheduler, checkpoint, unit_policy: see `initialize`.
    """

    model: nn.Module
    parameters: Sequence[ModelParameter]
    settings: TrainingConfig
    policy: UnitPolicy
    optimizer: StoreOptimizer
    scheduler: Scheduler | None
    initial: InitialArguments
    training_data: Dataset[Any] | None
    collate_fn: Callable[[list[Any]], Any] | None
    lr_scheduler: SchedulerArgument
    checkpoint: str | Path | None
    unit_policy: UnitPolicy | None

    def open_engine(
        self, args: Any, processes: tuple[bool | None, int], *, prefer_streams: bool
    ) -> tuple[Engine, DataLoader[Any] | None]:
        """Return the engine, and the loader of the training data if there are such data. All ranks must call this.

        Args:
            args: the script's arguments, whose attribute `local_rank`, if there is one, gets the rank's number on its
                node.
            processes: the arguments `dist_init_required` and `distributed_port` of `initialize`.
            prefer_streams: see `initialize`.
        """
        with ExitStack() as everything:
            resources = Resources(all=everything, apart=everything.enter_context(ExitStack()))
            joined = resources.apart.enter_context(ExitStack())
            recorder = Recorder()
            local_rank, collectives = join_ranks(self.settings, processes, joined, recorder)
            set_local_rank(args, local_rank)
            # The ranks compare their settings before they look for the daemon and the job. Ranks with different
            # settings would wait for each other there, or for a daemon that no rank starts.
            require_agreement(self._declare(collectives.device), local_rank, collectives)
            batch = resolve_batch_sizes(self.settings, collectives.world_size)
            if collectives.rank == 0:
                log.info("%s", _describe_scheduler(self.lr_scheduler, self.settings.scheduler))
                _log_config(self.settings, batch)
            loader = self._make_loader(batch, collectives)
            store_address = find_store(self.settings, collectives, local_rank, resources.apart)
            settings = self._choose_job(*store_address, collectives, local_rank, resources.apart)
            store, log_context = _connect(settings, *store_address, collectives, prefer_streams, recorder, resources)
            # This rank leaves the process group before it stops the daemon that it has started, because the daemon
            # waits at its end for the sessions of the other ranks. After an error on this rank, ranks that wait in a
            # collective for it fail as soon as it leaves, and end their sessions.
            resources.all.callback(joined.close)
            user = UserObjects(
                module=self.model,
                parameters=self.parameters,
                optimizer=self.optimizer,
                lr_scheduler=self.scheduler,
                data=loader if isinstance(loader, TrainingLoader) else None,
            )
            rank = RankContext(
                settings=settings,
                place=JobPlace.of(settings, os.environ),
                local_rank=local_rank,
                collectives=collectives,
                store=store,
                recorder=recorder,
                log_context=log_context,
            )
            return make_engine(user, rank, self._open_job(user, rank), batch, resources), loader

    def _declare(self, device: torch.device) -> Declaration:
        """Return the settings, parameters and arguments of this rank, which must be the same on all ranks.

        Objects such as a scheduler or a dataset cannot be compared between ranks. So the declaration says only whether
        each is given, and the number of samples of the training data.
        """
        arguments = {
            "lr_scheduler": self.lr_scheduler,
            "training_data": self.training_data,
            "weights": self.initial.weights,
            "checkpoint": self.checkpoint,
            "param_init_fn": self.initial.param_init_fn,
            "unit_policy": self.unit_policy,
            "model of an open engine": self.initial.former_engines or None,
        }
        given = {f"initialize({name}=...)": "given" for name, value in arguments.items() if value is not None}
        data, trained = self.training_data, self.optimizer.has_states
        return Declaration(
            run=dict(self.settings.values(Agreement.RUN))
            | given
            | {
                "initialize(strict_weights=...)": str(self.initial.strict_weights),
                "samples of training_data": str(len(data)) if isinstance(data, Sized) else "none",
                "torch.__version__": torch.__version__,
                "device": device.type,
            },
            node=self.settings.daemon_values(os.environ),
            lists={
                "parameter": [
                    f"{p.fqn} {list(p.shape)} {p.tensor.dtype} {'trained' if trained(p) else 'frozen'}"
                    for p in self.parameters
                ],
                "optimizer setting": [
                    f"{key} = {value!r} of parameter group {number}"
                    for number, group in enumerate(self.optimizer.settings())
                    for key, value in sorted(group.items())
                ],
            },
        )

    def _make_loader(self, batch: BatchSizes, collectives: Collectives) -> DataLoader[Any] | None:
        """Return the loader of the training data as the config asks for it; None if `training_data` is None."""
        return make_loader(
            self.training_data,
            batch,
            self.settings.paramserver.data,
            drop_last=self.settings.dataloader_drop_last,
            is_managed=self.settings.managed_gradient_accumulation,
            rank=collectives.rank,
            world_size=collectives.world_size,
            collate_fn=self.collate_fn,
        )

    def _choose_job(
        self, address: str, credentials: Credentials, collectives: Collectives, local_rank: int, resources: ExitStack
    ) -> TrainingConfig:
        """Take the model over from its former engines, and return the settings with the job of the new engine.

        All ranks must call this. The new engine shares the process group and the daemon with the former engines
        already, so the end of the former engines leaves both open.
        """
        self.initial.take_over()
        chosen = choose_job(self.settings, address, credentials, collectives, resources)
        if local_rank == 0 and self.settings.store_address(os.environ) is None:
            elements = sum(parameter.shape.numel() for parameter in self.parameters)
            remove_former_starts(address, chosen.paramserver.job, elements)
        return chosen

    def _open_job(self, user: UserObjects, rank: RankContext) -> Job:
        """Import the checkpoint into a new job, cast the buffers, and open the job. All ranks must call this."""
        is_imported = self.checkpoint is not None and import_at_start(
            self.checkpoint, rank.settings, rank.store, rank.collectives, self.model, self.parameters
        )
        are_rounded = rank.settings.paramserver.initial_weights == "rounded"
        values = self.initial.values(self.model, self.parameters, rank.collectives, are_rounded=are_rounded)
        cast_buffers(self.model, PrecisionPolicy.of(rank.settings).buffer_dtype)
        with naming_open_engines(rank.store.address, rank.place.job):
            return Job(user, rank, self.policy, values, is_imported=is_imported)


def set_local_rank(args: Any, local_rank: int) -> None:
    """Set `args.local_rank` to the rank's number on its node, if the script's arguments have this attribute."""
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank


def _describe_scheduler(argument: SchedulerArgument, section: ScheduleSection | None) -> str:
    """Return the log line that says, as DeepSpeed's, whether the scheduler is from the config or from the script."""
    configured = None if section is None else section.type
    if argument is None:
        return f"using configured LR scheduler = {configured}"
    source = "client LR scheduler" if isinstance(argument, LRScheduler) else "client callable to create LR scheduler"
    return f"using {source}" + (f"; the config's scheduler {configured} has no effect" if configured else "")


def _log_config(settings: TrainingConfig, batch: BatchSizes) -> None:
    """Log the values for "auto", keys of the config without an effect, and missing clipping. Only rank 0 calls this."""
    if automatic := describe_automatic(settings, batch):
        log.info("%s", automatic)
    if without_effect := describe_without_effect(settings, os.environ):
        log.warning("%s", without_effect)
    if not_clipped := describe_clipping(settings):
        log.warning("%s", not_clipped)


def _connect(
    settings: TrainingConfig,
    address: str,
    credentials: Credentials,
    collectives: Collectives,
    prefer_streams: bool,
    recorder: Recorder,
    resources: Resources,
) -> tuple[RankStore, LogContext]:
    """Open a session with the daemon at `address`.

    Return the store, and the context (job, rank, session) that this rank's log records carry from now on.
    """
    log_context = begin_log_context(settings.paramserver.job)
    log_context.rank = collectives.rank
    client = f"pid {os.getpid()} on {socket.gethostname()}, rank {collectives.rank} of {collectives.world_size}"
    log_context.session = client
    trace_parent = None if settings.paramserver.telemetry is None else TraceParent()
    section = settings.paramserver
    survival = Survival(
        timeout_seconds=section.reattach_timeout_seconds,
        kept_bytes=int(section.kept_gradients),
        durable_every=section.durable_every,
        is_loud=collectives.rank == 0,
    )
    store = RankStore(
        address,
        client,
        credentials,
        prefer_streams=prefer_streams,
        driver=None if prefer_streams else driver_of(collectives.device, settings.paramserver.pin_arena),
        recorder=recorder,
        survival=survival if section.reattach_timeout_seconds else None,
        trace_parent=trace_parent,
        on_rank_gone=collectives.process_groups.rank_has_gone,
    )
    resources.apart.callback(store.end_session)
    resources.all.callback(store.close)
    log.info("rank %d: store daemon at %s, data plane: %s", collectives.rank, address, store.plane.name)
    return store, log_context
