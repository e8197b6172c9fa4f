"""`initialize`: from a model and a config to an engine, step by step, and everything undone if a step fails.

Owns the order of things. Must never leave a daemon, a session or a process group behind after an error.
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
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainer_client.access import StateAccess
from trainer_client.config.training_config import BatchSizes, TrainingConfig, load_config, resolve_batch_sizes
from trainer_client.engine import Engine
from trainer_client.errors import ConfigError, LocalDaemonError
from trainer_client.initial.initial_values import InitialValues
from trainer_client.initial.loading import Weights
from trainer_client.initial.module_init import ParamInitFn
from trainer_client.model.parameters import ModelParameter, list_parameters
from trainer_client.model.unit_policy import UnitPolicy, choose_policy
from trainer_client.ranks.agreement import Declaration, require_agreement
from trainer_client.ranks.collectives import Collectives
from trainer_client.recorder import Recorder
from trainer_client.report.reporter import Reporter
from trainer_client.report.step_report import Part
from trainer_client.report.step_trace import StepTrace
from trainer_client.run.commits import Commits
from trainer_client.run.data_loader import TrainingLoader, make_loader
from trainer_client.run.job import Job
from trainer_client.run.local_daemon import LocalDaemon, local_address
from trainer_client.run.run_state import RunState, Scheduler
from trainer_client.section import Agreement
from trainer_client.step.gradients import Gradients, ReductionSchedule
from trainer_client.step.hooks import UnitHooks
from trainer_client.step.precision import LossScaler, PrecisionPolicy
from trainer_client.step.reduction_order import ReductionOrder
from trainer_client.step.residency import Residency
from trainer_client.step.trace import Clock
from trainer_client.step.training_step import Clipping, TrainingStep
from trainer_client.step.updates import Updates
from trainer_client.store_optimizer import OptimizerArgument, StoreOptimizer, make_optimizer
from trainer_client.transport.attachments import Survival
from trainer_client.transport.channel import wait_until_serving
from trainer_client.transport.credentials import NO_CREDENTIALS
from trainer_client.transport.rank_store import RankStore

log = logging.getLogger(__name__)

SchedulerArgument = LRScheduler | Callable[[torch.optim.Optimizer], Scheduler] | None

_SERVING_SECONDS = 30.0

# Of the store's host tier, all ranks together have this part (1 / it) filled ahead of use.
_PREFETCH_SHARE = 4


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerArgument = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerArgument = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
    *,
    weights: str | Path | None = None,
    strict_weights: bool = True,
    param_init_fn: ParamInitFn | None = None,
    unit_policy: UnitPolicy | None = None,
    prefer_streams: bool = False,
) -> tuple[Engine, StoreOptimizer, DataLoader[Any] | None, Scheduler | None]:
    """Starts or resumes a training job. DeepSpeed's signature and return value; every rank calls it alike.

    Args:
        args: its `deepspeed_config` is the config's path if `config` is None.
        model: floating-point parameters, on the CPU, or on the meta device: built under `trainer_client.zero.Init()`,
            or under torch.device("meta") where its own functions can initialise it. Afterwards they live in the store.
            On a new job, rank 0's initial values count; on a resume the initial values do not matter.
        optimizer: a fresh `torch.optim.AdamW`, `Adam`, `SGD`, `Adagrad` or `trainer_client.Lion`, or a callable from
            parameters to one; None: the config's.
        model_parameters: what to optimise, as parameters or parameter groups; None: all trainable ones.
        training_data: a dataset, for the data loader that is returned. One that has a length is loaded in an order that
            the number of ranks does not change, and its cursor is in every commit: see run/data_loader.py.
        lr_scheduler: a scheduler made for `optimizer`, or a callable from the optimizer to one.
        distributed_port: of the rendezvous, where the environment has no MASTER_PORT.
        dist_init_required: True: initialise torch.distributed; False: it is initialised; None: as needed.
        collate_fn: for the data loader.
        config, config_params: a dict or the path of a JSON file; two names of one argument.
        weights: a safetensors file, or a directory with model.safetensors or model.safetensors.index.json: the values
            that a new job begins with. Each rank reads its own parts. (On a resume, buffers are read from it.)
        strict_weights: False: what the files lack keeps its initial values, what the model lacks is left out.
        param_init_fn: initialises the parameters and buffers that a module on the meta device itself has, in place (as
            FSDP's); None: its `reset_parameters()`, then `_init_weights(module)` of the transformers model around it.
        unit_policy: from the model to the modules that are gathered and released as a whole; None: `paramserver.units`.
        prefer_streams: move tensors over gRPC although the store is on this node (for tests of that path).

    Returns:
        (engine, optimizer, data loader or None, scheduler or None)

    Raises:
        ConfigError: an argument or a config key that cannot be honoured.
        RankMismatchError: ranks differ in config, model, optimizer or arguments; every rank raises the same message.
        StoreError, LocalDaemonError: the store refused, cannot be reached or cannot be started.
    """
    refused = {"mpu": mpu, "mesh_param": mesh_param}
    if given := [name for name, value in refused.items() if value is not None]:
        raise ConfigError(f"initialize({given[0]}=...) is not honoured by this version: parallelism is ZeRO-3 only")
    if model is None:
        raise ConfigError("initialize(model=None): pass the model")
    settings = load_config(_config_source(args, config, config_params), os.environ)
    policy = choose_policy(settings.paramserver.units, unit_policy)
    parameters = list_parameters(model)
    store_optimizer = make_optimizer(
        optimizer, settings.optimizer, model_parameters, parameters, settings.paramserver.may_thaw
    )
    scheduler = _make_scheduler(lr_scheduler, optimizer, store_optimizer)
    with ExitStack() as resources:
        processes = resources.enter_context(ExitStack())
        local_rank, device = _join_processes(dist_init_required, distributed_port, processes)
        recorder = Recorder()
        collectives = Collectives(device, settings.paramserver.collective_timeout_seconds, recorder)
        processes.callback(collectives.close)
        # First of all: ranks that differ would wait for each other, or for a daemon that none of them starts.
        require_agreement(
            _declare(
                settings,
                parameters,
                store_optimizer,
                device,
                {
                    "lr_scheduler": scheduler,
                    "training_data": training_data,
                    "weights": weights,
                    "param_init_fn": param_init_fn,
                    "unit_policy": unit_policy,
                },
                strict_weights=strict_weights,
            ),
            local_rank,
            collectives,
        )
        batch = resolve_batch_sizes(settings, collectives.world_size)
        loader = make_loader(
            training_data,
            batch,
            settings.paramserver.data,
            rank=collectives.rank,
            world_size=collectives.world_size,
            collate_fn=collate_fn,
        )
        store = _connect(settings, collectives, local_rank, prefer_streams, recorder, resources)
        # Left before the daemon is stopped: after an error here, peers in a collective with this rank fail at once and
        # end their sessions, which the daemon's end waits for.
        resources.callback(processes.close)
        initial_values = InitialValues(
            model,
            parameters,
            collectives,
            param_init_fn=param_init_fn,
            weights=Weights(weights) if weights is not None else None,
            strict_weights=strict_weights,
        )
        job = Job(settings, model, parameters, store_optimizer, store, collectives, policy, initial_values)
        engine = _make_engine(
            settings,
            model,
            parameters,
            store_optimizer,
            scheduler,
            job,
            store,
            collectives,
            batch,
            loader if isinstance(loader, TrainingLoader) else None,
            local_rank,
            recorder,
            resources,
        )
    return engine, store_optimizer, loader, scheduler


def _make_engine(
    settings: TrainingConfig,
    model: nn.Module,
    parameters: Sequence[ModelParameter],
    optimizer: StoreOptimizer,
    scheduler: Scheduler | None,
    job: Job,
    store: RankStore,
    collectives: Collectives,
    batch: BatchSizes,
    data: TrainingLoader | None,
    local_rank: int,
    recorder: Recorder,
    resources: ExitStack,
) -> Engine:
    """An engine at the job's newest step, or at step 0 of a new job. A collective."""
    policy = PrecisionPolicy.of(settings)
    clipping = Clipping(norm=settings.gradient_clipping, value=settings.paramserver.gradient_clipping_value)
    gradients = Gradients(
        job.units, job.states, policy.reduction_dtype, store, collectives, exact_norms=clipping.norm > 0
    )
    scaler = LossScaler(settings.fp16)
    step = TrainingStep(
        gradients=gradients,
        updates=Updates(job.states, store, collectives),
        optimizer=optimizer,
        scaler=scaler,
        clipping=clipping,
        early_updates=settings.paramserver.early_updates,
        parameters=len(parameters),
    )
    trace = None
    if settings.paramserver.trace is not None:
        trace = StepTrace(settings.paramserver.trace, recorder, store, collectives.rank)
        resources.callback(trace.close)
    clock = Clock()
    residency = Residency(
        job.units,
        store,
        prefetch_bytes=store.arena_bytes // (_PREFETCH_SHARE * job.sharers),
        kept_elements=settings.zero_optimization.stage3_max_live_parameters,
        is_alone=job.sharers == 1,
        recorder=recorder,
    )
    for unit in job.units:
        # Before the session ends: what a unit shows afterwards would keep the store's memory from being freed.
        resources.callback(unit.abandon)
    hooks = UnitHooks(
        units=job.units,
        gradients=gradients,
        residency=residency,
        reduction_order=ReductionOrder(len(job.units), collectives),
        compute_dtype=policy.compute_dtype,
        clock=clock,
        recorder=recorder,
    )
    hooks.install()
    commits = Commits(
        store, job.states, settings.paramserver.durability, newest=job.resumed_step, staged=job.staged_step
    )
    engine = Engine(
        module=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        parameters=parameters,
        states=job.states,
        step=step,
        hooks=hooks,
        gather=job.gather,
        access=StateAccess(
            model=model,
            units=job.units,
            states=job.states,
            gradients=gradients,
            scaler=scaler,
            collectives=collectives,
        ),
        store=store,
        commits=commits,
        collectives=collectives,
        scaler=scaler,
        run_state=RunState(
            step=step,
            scaler=scaler,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            clock=clock,
            batch=batch,
            data=data,
            device=collectives.device,
        ),
        batch=batch,
        data=data,
        reduction=ReductionSchedule.of(settings),
        max_skipped_in_row=settings.paramserver.max_consecutive_skipped_steps,
        steps_per_print=settings.steps_per_print,
        reporter=Reporter(
            recorder,
            residency.counters,
            store,
            Part(
                parameters=sum(parameter.shape.numel() for parameter in parameters),
                world_size=collectives.world_size,
                sharers=job.sharers,
                data_plane=store.plane.name,
            ),
            trace,
        ),
        local_rank=local_rank,
        resources=resources.pop_all(),
    )
    try:
        if job.resumed_state is not None:
            engine.take_over(job.resumed_state)
        if job.staged_step is not None:
            engine.commit_initial_state()
        if settings.paramserver.reattach_timeout_seconds:
            survival = Survival(
                timeout_seconds=settings.paramserver.reattach_timeout_seconds,
                kept_bytes=int(settings.paramserver.kept_gradients),
                is_loud=collectives.rank == 0,
            )
            store.survive_restarts(survival, layout=job.layout, newest=commits.newest)
    except BaseException:
        engine.leave()
        raise
    return engine


def _config_source(
    args: Any, config: Mapping[str, Any] | str | Path | None, config_params: Mapping[str, Any] | str | Path | None
) -> Mapping[str, Any] | str | Path:
    if config is not None and config_params is not None:
        raise ConfigError("initialize(config=..., config_params=...) are two names of one argument: pass one")
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise ConfigError("no config: pass initialize(config=...), a dict or the path of a JSON file")
    return source


def _make_scheduler(
    argument: SchedulerArgument, original: OptimizerArgument, optimizer: StoreOptimizer
) -> Scheduler | None:
    scheduler: Any = argument
    if argument is not None and not isinstance(argument, LRScheduler):
        scheduler = argument(optimizer)
    elif isinstance(argument, LRScheduler) and argument.optimizer is not original:
        raise ConfigError("lr_scheduler drives another optimizer: make it for the one that is passed beside it")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError("lr_scheduler ReduceLROnPlateau is not honoured by this version: it steps on a metric")
    made: Scheduler | None = scheduler
    return made


def _declare(
    settings: TrainingConfig,
    parameters: Sequence[ModelParameter],
    optimizer: StoreOptimizer,
    device: torch.device,
    arguments: Mapping[str, Any],
    *,
    strict_weights: bool,
) -> Declaration:
    """Return what this rank has, of which all ranks must have the same. Of `arguments` that have names of their own on
    each rank, it is whether they are given, and the size of the data."""
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


def _join_processes(required: bool | None, port: int, processes: ExitStack) -> tuple[int, torch.device]:
    """Joins the process group that the launcher announced, if any; (local rank, device)."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    launched = "RANK" in os.environ
    if dist.is_initialized() or not (launched or required):
        return local_rank, device
    if required is False:
        raise ConfigError("dist_init_required=False, but torch.distributed is not initialised: initialise it first")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "MASTER_PORT" in os.environ:
        dist.init_process_group(backend)
    else:
        master = f"tcp://{os.environ.get('MASTER_ADDR', 'localhost')}:{port}"
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        dist.init_process_group(backend, init_method=master, rank=rank, world_size=world_size)
    processes.callback(dist.destroy_process_group)
    return local_rank, device


def _connect(
    settings: TrainingConfig,
    collectives: Collectives,
    local_rank: int,
    prefer_streams: bool,
    recorder: Recorder,
    resources: ExitStack,
) -> RankStore:
    """A session with the operator's daemon, or with one that the first rank of this node starts. A collective."""
    address = settings.store_address(os.environ)
    credentials = NO_CREDENTIALS if address is None else settings.credentials(os.environ)
    if address is None:
        failure: LocalDaemonError | None = None
        if local_rank == 0:
            try:
                resources.callback(LocalDaemon(settings).stop)
            except LocalDaemonError as error:
                failure = error
        # Others connect only now: a predecessor's socket may have been there a moment ago.
        failed_somewhere = any(collectives.any_rank([failure is not None]))
        if failure is not None:
            raise failure
        if failed_somewhere:
            raise LocalDaemonError("the rank that starts a node's store daemon has failed: see its message")
        address = local_address(settings.state_dir())
    wait_until_serving(address, _SERVING_SECONDS, credentials)
    client = f"pid {os.getpid()} on {socket.gethostname()}, rank {collectives.rank} of {collectives.world_size}"
    store = RankStore(address, client, credentials, prefer_streams=prefer_streams, recorder=recorder)
    resources.callback(store.close)
    log.info("rank %d: store daemon at %s, data plane: %s", collectives.rank, address, store.plane.name)
    return store
