"""`initialize`: from a model and a config to an engine, step by step. If a step fails, all steps are undone.

This module owns the order of these steps. It must never leave a daemon, a session or a process group behind after an
error.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from paramserver.contract.bearer import TraceParent
from trainer_client import comm
from trainer_client.base.log_context import LogContext
from trainer_client.base.log_context import begin as begin_log_context
from trainer_client.base.recorder import Recorder
from trainer_client.base.section import Agreement
from trainer_client.client.transport.attachments import Survival
from trainer_client.client.transport.credentials import Credentials
from trainer_client.client.transport.pinning import driver_of
from trainer_client.client.transport.rank_store import RankStore
from trainer_client.config.batch_sizes import BatchSizes, resolve_batch_sizes
from trainer_client.config.loading import load_config
from trainer_client.config.log_lines import describe_automatic, describe_clipping, describe_without_effect
from trainer_client.config.tiling import TilingSection
from trainer_client.config.training_config import TrainingConfig
from trainer_client.engine.assembly import make_engine
from trainer_client.engine.engine import Engine
from trainer_client.errors import ConfigError
from trainer_client.exchange.first_import import import_at_start
from trainer_client.inference.engine import InferenceEngine
from trainer_client.inference.opening import InitialArguments, open_engine, take_over
from trainer_client.inference.whole_engine import WholeEngine, open_whole_engine
from trainer_client.interface_version import log_version
from trainer_client.schedules.registry import make_schedule
from trainer_client.schedules.schedule import ScheduleSection
from trainer_client.training.data_parallel import check_mpu
from trainer_client.training.initial.deferred_init import RecipeRecorder
from trainer_client.training.initial.initial_values import InitialValues
from trainer_client.training.initial.loading import Weights
from trainer_client.training.initial.module_init import ParamInitFn
from trainer_client.training.model.buffers import cast_buffers
from trainer_client.training.model.leaves import mark_configured_leaves
from trainer_client.training.model.owners import is_owned, owner_of
from trainer_client.training.model.parameters import ModelParameter, list_parameters
from trainer_client.training.model.registered import external_parameters
from trainer_client.training.model.unit_policy import UnitPolicy, choose_policy
from trainer_client.training.ranks.agreement import Declaration, require_agreement
from trainer_client.training.ranks.collectives import Collectives
from trainer_client.training.run.context import RankContext, Resources, UserObjects
from trainer_client.training.run.data_loader import TrainingLoader, make_loader
from trainer_client.training.run.forgotten import collect_forgotten
from trainer_client.training.run.former_starts import remove_former_starts
from trainer_client.training.run.job import Job
from trainer_client.training.run.job_choice import choose_job, naming_its_jobs, naming_open_engines
from trainer_client.training.run.job_place import JobPlace
from trainer_client.training.run.node_store import find_store, join_processes
from trainer_client.training.run.run_state import Scheduler
from trainer_client.training.run.schedule_state import rates_of, restore_rates
from trainer_client.training.step.precision import PrecisionPolicy
from trainer_client.training.store_optimizer import OptimizerArgument, StoreOptimizer, make_optimizer

log = logging.getLogger(__name__)

SchedulerArgument = LRScheduler | Callable[[torch.optim.Optimizer], Scheduler] | None


@RecipeRecorder.suspended()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerArgument = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerArgument = None,
    distributed_port: int = comm.DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    weights: str | Path | None = None,
    strict_weights: bool = True,
    checkpoint: str | Path | None = None,
    param_init_fn: ParamInitFn | None = None,
    unit_policy: UnitPolicy | None = None,
    prefer_streams: bool = False,
) -> tuple[Engine, StoreOptimizer, DataLoader[Any] | None, Scheduler | None]:
    """Start or resume a training job. The signature and the return value are DeepSpeed's. Every rank calls it alike.

        engine, optimizer, loader, scheduler = initialize(model=model, config="config.json")

    Args:
        args: an object whose `deepspeed_config` is the path of the config if `config` is None. Its `local_rank` is set
            to the rank's number on its node if it has such an attribute.
        model: a model with floating-point parameters, on the CPU or on the meta device. On the meta device it was built
            under `trainer_client.zero.Init()`, or under torch.device("meta") if its own functions can initialise it.
            Afterwards the parameters live in the store. A new job begins with the initial values of rank 0; on a
            resume the initial values do not matter. A model of an open engine leaves that engine, with the weights and
            in the dtype that it has there; the former engine is closed then. A model of an engine that was closed has
            its weights at stages 0 to 2.
        optimizer: a fresh `torch.optim.AdamW`, `Adam`, `SGD`, `Adagrad` or `trainer_client.Lion`, or a callable from
            parameters to one; None: the optimizer of the config. If that has none either, the engine is for inference.
        model_parameters: the parameters to optimise, or parameter groups of them; None: all trainable parameters.
            Without effect beside an optimizer instance, which has its groups (as with DeepSpeed), and without any
            optimizer.
        training_data: a dataset, for the data loader that is returned. A dataset that has a length is loaded in an
            order that does not depend on the number of ranks, and its cursor is in every commit: see
            training/run/data_loader.py.
        lr_scheduler: a scheduler made for `optimizer`, or a callable from the optimizer to one; None: the scheduler of
            the config, if it has one.
        distributed_port: the port of the rendezvous, if the environment has no MASTER_PORT.
        mpu: accepted if it splits nothing but the data.
        dist_init_required: True: initialise torch.distributed; False: it is initialised; None: initialise it if needed.
        collate_fn: the function with which the data loader makes a batch of samples.
        config, config_params: the config, as a dict or the path of a JSON file: two names of one argument.
        weights: a safetensors file, or a directory with model.safetensors or model.safetensors.index.json, with the
            values that a new job begins with. Each rank reads its own parts. (On a resume, those
            buffers are read from it that the commit does not have.)
        strict_weights: whether files and model must have the same names. False: values that the files lack keep their
            initial values, and values that the model lacks are left out.
        checkpoint: a checkpoint of DeepSpeed or another framework, as for `paramserver import`: a path or a URL. A job
            that has no step yet, nor a replica with one, goes on from it, with its optimizer states and counters.
            Otherwise, and where `paramserver.resume` is "must", it has no effect.
        param_init_fn: a function that initialises the own parameters and buffers of a module on the meta device, in
            place (as FSDP's); None: the module's `reset_parameters()`, then `_init_weights(module)` of the transformers
            model around it.
        unit_policy: a function from the model to the modules that are gathered and released as a whole; None:
            `paramserver.units`.
        prefer_streams: whether to move tensors over gRPC although the store is on this node (for tests of that path).

    Returns:
        (engine, optimizer, data loader or None, scheduler or None). Without an optimizer the engine is an
        `InferenceEngine` at stage 3 and a `WholeEngine` at the others, and the others are None. An `InferenceEngine`
        has the weights of the job that the config names, else those of `weights` or of the model; a model on the meta
        device gets those of the job `default` then.

    Raises:
        ConfigError: an argument or a config key cannot be honoured.
        RankMismatchError: the ranks differ in config, model, optimizer or arguments; every rank raises the same
            message.
        StoreError, LocalDaemonError: the store refused, cannot be reached or cannot be started.
    """
    if mesh_param is not None:
        raise ConfigError(
            "initialize(mesh_param=...) is not honoured by this version: it has data parallelism only (ZeRO)"
        )
    if model is None:
        raise ConfigError("initialize(model=None): pass the model")
    if checkpoint is not None and weights is not None:
        raise ConfigError("initialize(checkpoint=..., weights=...): the checkpoint has weights; pass one of them")
    check_mpu("initialize(mpu=...)", mpu)
    parameters = list_parameters(model)
    settings = load_config(
        _config_source(args, config, config_params), os.environ, {p.tensor.dtype for p in parameters}
    )
    _begin_log(settings.log_level)
    policy = choose_policy(settings.paramserver.units, unit_policy)
    former_engines = _former_engines(parameters)
    _mark(model, settings)
    if optimizer is None and settings.optimizer is None:
        _refuse_for_inference(training_data=training_data, lr_scheduler=lr_scheduler, checkpoint=checkpoint)
        without_optimizer = _open_without_optimizer(
            model,
            parameters,
            settings,
            policy,
            InitialArguments(weights, strict_weights, param_init_fn, former_engines),
            processes=(dist_init_required, distributed_port),
            prefer_streams=prefer_streams,
        )
        _set_local_rank(args, without_optimizer.local_rank)
        # A call without an optimizer returns None in its place. The type says otherwise, because the config decides
        # it, which types cannot show, and training loops would have to check for None.
        returned: Any = (without_optimizer, None, None, None)
        result: tuple[Engine, StoreOptimizer, None, None] = returned
        return result
    store_optimizer = make_optimizer(
        optimizer, settings.optimizer, model_parameters, parameters, settings.paramserver.may_thaw
    )
    scheduler = _make_scheduler(lr_scheduler, settings.scheduler, optimizer, store_optimizer)
    with ExitStack() as everything:
        resources = Resources(all=everything, apart=everything.enter_context(ExitStack()))
        processes = resources.apart.enter_context(ExitStack())
        local_rank, device = join_processes(settings, dist_init_required, distributed_port, processes)
        _set_local_rank(args, local_rank)
        recorder = Recorder()
        collectives = Collectives(device, settings.paramserver.collective_timeout_seconds, recorder)
        processes.callback(collectives.close)
        # This comes first, because ranks that differ would wait for each other, or for a daemon that none of them
        # starts.
        require_agreement(
            _declare(
                settings,
                parameters,
                store_optimizer,
                device,
                {
                    "lr_scheduler": lr_scheduler,
                    "training_data": training_data,
                    "weights": weights,
                    "checkpoint": checkpoint,
                    "param_init_fn": param_init_fn,
                    "unit_policy": unit_policy,
                    "model of an open engine": former_engines or None,
                },
                strict_weights=strict_weights,
            ),
            local_rank,
            collectives,
        )
        batch = resolve_batch_sizes(settings, collectives.world_size)
        if collectives.rank == 0:
            log.info("%s", _describe_scheduler(lr_scheduler, settings.scheduler))
            _log_config(settings, batch)
        loader = _make_loader(training_data, batch, settings, collectives, collate_fn)
        store_address = find_store(settings, collectives, local_rank, resources.apart)
        settings = _choose_job(
            former_engines, parameters, settings, *store_address, collectives, local_rank, resources.apart
        )
        store, log_context = _connect(settings, *store_address, collectives, prefer_streams, recorder, resources)
        # The process group is left before the daemon is stopped. After an error here, other ranks in a collective with
        # this one fail at once then, and end their sessions, for which the end of the daemon waits.
        resources.all.callback(processes.close)
        is_imported = checkpoint is not None and import_at_start(
            checkpoint, settings, store, collectives, model, parameters
        )
        initial_values = InitialValues(
            model,
            parameters,
            collectives,
            param_init_fn=param_init_fn,
            weights=Weights(weights) if weights is not None else None,
            strict_weights=strict_weights,
            are_rounded=settings.paramserver.initial_weights == "rounded",
        )
        user = UserObjects(
            module=model,
            parameters=parameters,
            optimizer=store_optimizer,
            lr_scheduler=scheduler,
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
        job = _open_job(user, rank, policy, initial_values, is_imported=is_imported)
        engine = make_engine(user, rank, job, batch, resources)
    for module, parameter in external_parameters(model):
        if owner_of(parameter) is engine:
            engine.register_external_parameter(module, parameter)
    return engine, store_optimizer, loader, scheduler


def initialize_with_rates_of_script(
    *,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    config: Mapping[str, Any],
    model_parameters: Any = None,
    lr_scheduler: SchedulerArgument = None,
    dist_init_required: bool | None = None,
) -> tuple[Engine, StoreOptimizer, DataLoader[Any] | None, Scheduler | None]:
    """Start or resume a training job for a program whose own learning-rate schedule begins anew at each start.

    The parameter groups of a resumed job have the rates to which the job has decayed them, and many schedules multiply
    the rate that is there. So the groups get the rates back with which the script has made `optimizer`, unless the
    engine has a schedule, which goes on from the stored one. Rank 0 logs rates that differ from the stored ones.

    Arguments, return value and errors are those of `initialize`.
    """
    rates = [] if optimizer is None else rates_of(optimizer.param_groups)
    with naming_its_jobs():
        engine, store_optimizer, loader, scheduler = initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            dist_init_required=dist_init_required,
            config=config,
        )
    if engine.lr_scheduler is None:
        restore_rates(store_optimizer.param_groups, rates, is_loud=engine.global_rank == 0)
    return engine, store_optimizer, loader, scheduler


def _mark(model: nn.Module, settings: TrainingConfig) -> None:
    """Mark the leaves of the model, and the parameters whose gradients are reduced in autocast's dtype."""
    mark_configured_leaves(model, settings.zero_optimization)
    PrecisionPolicy.of(settings).mark_reductions(model)


def _set_local_rank(args: Any, local_rank: int) -> None:
    """Set the rank's number on its node in the script's arguments, if they have an attribute for it."""
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank


def _former_engines(parameters: Sequence[ModelParameter]) -> list[Engine]:
    """Return the open engines that parameters of the model belong to, in the order of the parameters.

    Engines that the program has forgotten are ended first.

    Raises:
        ConfigError: an engine was closed or deleted, so that its parameters have no values; or an engine for inference
            is open.
    """
    collect_forgotten()
    engines: dict[int, Engine] = {}
    for parameter in parameters:
        engine = owner_of(parameter.tensor)
        if isinstance(engine, Engine) and not engine.is_closed:
            engines[id(engine)] = engine
        elif isinstance(engine, InferenceEngine):
            raise ConfigError(
                f"initialize(model=...): parameter {parameter.fqn} belongs to an open engine for inference: "
                "close that engine first; for a job that the store does not have yet, build the model anew"
            )
        elif is_owned(parameter.tensor):
            raise ConfigError(
                f"initialize(model=...): parameter {parameter.fqn} of the model belongs to an engine of stage 3 that "
                "was closed or deleted, and its values are in the store: build the model anew; or call initialize() "
                "before the engine is closed, which takes the model over with its weights"
            )
    return list(engines.values())


def _open_without_optimizer(
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    settings: TrainingConfig,
    policy: UnitPolicy,
    initial: InitialArguments,
    *,
    processes: tuple[bool | None, int],
    prefer_streams: bool,
) -> InferenceEngine | WholeEngine:
    """Return the engine for a model that nothing optimises: at stage 3 from the store, at the others whole."""
    if comm.get_rank() == 0 and (without_effect := describe_without_effect(settings, os.environ)):
        # This is no warning, because such a model is mostly the reference beside one that is trained, with its config.
        log.info("%s", without_effect)
    if settings.paramserver.tiling != TilingSection():
        log.warning("paramserver.tiling has no effect without an optimizer: an engine for inference leases whole units")
    if settings.zero_optimization.stage < 3:
        return open_whole_engine(model, parameters, settings, initial, processes)
    return open_engine(model, parameters, settings, policy, initial, processes=processes, prefer_streams=prefer_streams)


def _refuse_for_inference(**arguments: Any) -> None:
    """Raise ConfigError for the first argument that is given, because an engine for inference has no use for it."""
    for name, value in arguments.items():
        if value is not None:
            instead = "; write the checkpoint into the store with `paramserver import`" if name == "checkpoint" else ""
            raise ConfigError(
                f"initialize({name}=...) needs an optimizer: without one, the engine is for inference{instead}"
            )


def _make_loader(
    training_data: Dataset[Any] | None,
    batch: BatchSizes,
    settings: TrainingConfig,
    collectives: Collectives,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any] | None:
    """Return the loader of the training data as the config asks for it; None if there are no such data."""
    return make_loader(
        training_data,
        batch,
        settings.paramserver.data,
        drop_last=settings.dataloader_drop_last,
        is_managed=settings.managed_gradient_accumulation,
        rank=collectives.rank,
        world_size=collectives.world_size,
        collate_fn=collate_fn,
    )


def _config_source(
    args: Any, config: Mapping[str, Any] | str | Path | None, config_params: Mapping[str, Any] | str | Path | None
) -> Mapping[str, Any] | str | Path:
    """Return the config from the argument that gives it. Raise ConfigError for none, or for two."""
    if config is not None and config_params is not None:
        raise ConfigError("initialize(config=..., config_params=...) are two names of one argument: pass one")
    source = config if config is not None else config_params
    for name in ("deepspeed_config", "deepscale_config"):
        source = getattr(args, name, None) if source is None else source
    if source is None:
        raise ConfigError("no config: pass initialize(config=...), a dict or the path of a JSON file")
    return source


def _log_config(settings: TrainingConfig, batch: BatchSizes) -> None:
    """Log what differs between the config and what it means here. Rank 0 does this for all ranks."""
    if automatic := describe_automatic(settings, batch):
        log.info("%s", automatic)
    if without_effect := describe_without_effect(settings, os.environ):
        log.warning("%s", without_effect)
    if not_clipped := describe_clipping(settings):
        log.warning("%s", not_clipped)


def _begin_log(level: str | None) -> None:
    """Log DeepSpeed's line about its version on rank 0.

    Args:
        level: a level for this library's logger and for the one that scripts get as `deepspeed.utils.logger`; None:
            both keep theirs.
    """
    if level is not None:
        for name in ("trainer_client", "DeepSpeed"):
            logging.getLogger(name).setLevel(level.upper())
    if comm.get_rank() == 0:
        log_version()


def _make_scheduler(
    argument: SchedulerArgument,
    section: ScheduleSection | None,
    original: OptimizerArgument,
    optimizer: StoreOptimizer,
) -> Scheduler | None:
    """Return the scheduler that drives `optimizer`, which was made of the user's `original`.

    The argument of `initialize` comes before the config's section, as in DeepSpeed.
    """
    if argument is None:
        return None if section is None else make_schedule(section, optimizer)
    scheduler: Any = argument
    if not isinstance(argument, LRScheduler):
        scheduler = argument(optimizer)
    elif argument.optimizer is not original:
        raise ConfigError("lr_scheduler drives another optimizer: make it for the one that is passed beside it")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError("lr_scheduler ReduceLROnPlateau is not honoured by this version: it steps on a metric")
    made: Scheduler | None = scheduler
    return made


def _describe_scheduler(argument: SchedulerArgument, section: ScheduleSection | None) -> str:
    """Return DeepSpeed's line for the log that says where the scheduler is from."""
    configured = None if section is None else section.type
    if argument is None:
        return f"using configured LR scheduler = {configured}"
    source = "client LR scheduler" if isinstance(argument, LRScheduler) else "client callable to create LR scheduler"
    return f"using {source}" + (f"; the config's scheduler {configured} has no effect" if configured else "")


def _declare(
    settings: TrainingConfig,
    parameters: Sequence[ModelParameter],
    optimizer: StoreOptimizer,
    device: torch.device,
    arguments: Mapping[str, Any],
    *,
    strict_weights: bool,
) -> Declaration:
    """Return the settings, parameters and arguments of this rank, which must be the same on all ranks.

    Args:
        arguments: objects that cannot be compared between ranks. Only whether each is given is declared, and the size
            of the training data.
    """
    given = {f"initialize({name}=...)": "given" for name, value in arguments.items() if value is not None}
    data = arguments["training_data"]
    return Declaration(
        run=dict(settings.values(Agreement.RUN))
        | given
        | {
            "initialize(strict_weights=...)": str(strict_weights),
            "samples of training_data": str(len(data)) if isinstance(data, Sized) else "none",
            "torch.__version__": torch.__version__,
            "device": device.type,
        },
        node=settings.daemon_values(os.environ),
        lists={
            "parameter": [
                f"{p.fqn} {list(p.shape)} {p.tensor.dtype} {'trained' if optimizer.has_states(p) else 'frozen'}"
                for p in parameters
            ],
            "optimizer setting": [
                f"{key} = {value!r} of parameter group {number}"
                for number, group in enumerate(optimizer.settings())
                for key, value in sorted(group.items())
            ],
        },
    )


def _open_job(
    user: UserObjects, rank: RankContext, policy: UnitPolicy, initial_values: InitialValues, *, is_imported: bool
) -> Job:
    """Give the model's buffers the dtype that the config asks for, and open the job. All ranks must call this."""
    cast_buffers(user.module, PrecisionPolicy.of(rank.settings).buffer_dtype)
    with naming_open_engines(rank.store.address, rank.place.job):
        return Job(user, rank, policy, initial_values, is_imported=is_imported)


def _choose_job(
    former_engines: Sequence[Engine],
    parameters: Sequence[ModelParameter],
    settings: TrainingConfig,
    address: str,
    credentials: Credentials,
    collectives: Collectives,
    local_rank: int,
    resources: ExitStack,
) -> TrainingConfig:
    """Take the model over from its former engines, and return the settings with the job of the new one.

    The new engine shares the process group and the daemon with the former ones by now, so that these stay. All ranks
    must call this.
    """
    take_over(former_engines)
    chosen = choose_job(settings, address, credentials, collectives, resources)
    if local_rank == 0 and settings.store_address(os.environ) is None:
        remove_former_starts(address, chosen.paramserver.job, sum(p.shape.numel() for p in parameters))
    return chosen


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

    Return the store, and what this rank's log records carry from now on.
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
        on_rank_gone=collectives.rank_has_gone,
    )
    resources.apart.callback(store.end_session)
    resources.all.callback(store.close)
    log.info("rank %d: store daemon at %s, data plane: %s", collectives.rank, address, store.plane.name)
    return store, log_context
