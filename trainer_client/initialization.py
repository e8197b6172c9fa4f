"""`initialize`: from a model and a config to an engine, step by step. If a step fails, all steps are undone.

Owns the order of these steps. Must never leave a daemon, a session or a process group behind after an error.
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

from trainer_client.assembly import make_engine
from trainer_client.config.training_config import TrainingConfig, load_config, resolve_batch_sizes
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
from trainer_client.run.context import RankContext, UserObjects
from trainer_client.run.data_loader import TrainingLoader, make_loader
from trainer_client.run.job import Job
from trainer_client.run.local_daemon import LocalDaemon, local_address
from trainer_client.run.run_state import Scheduler
from trainer_client.section import Agreement
from trainer_client.store_optimizer import OptimizerArgument, StoreOptimizer, make_optimizer
from trainer_client.transport.channel import wait_until_serving
from trainer_client.transport.credentials import NO_CREDENTIALS
from trainer_client.transport.rank_store import RankStore

log = logging.getLogger(__name__)

SchedulerArgument = LRScheduler | Callable[[torch.optim.Optimizer], Scheduler] | None

_SERVING_SECONDS = 30.0


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
    """Start or resume a training job. The signature and the return value are DeepSpeed's. Every rank calls it alike.

        engine, optimizer, loader, scheduler = initialize(model=model, config="config.json")

    Args:
        args: an object whose `deepspeed_config` is the path of the config if `config` is None.
        model: a model with floating-point parameters, on the CPU or on the meta device. On the meta device it was built
            under `trainer_client.zero.Init()`, or under torch.device("meta") if its own functions can initialise it.
            Afterwards the parameters live in the store. A new job begins with the initial values of rank 0; on a
            resume the initial values do not matter.
        optimizer: a fresh `torch.optim.AdamW`, `Adam`, `SGD`, `Adagrad` or `trainer_client.Lion`, or a callable from
            parameters to one; None: the optimizer of the config.
        model_parameters: the parameters to optimise, or parameter groups of them; None: all trainable parameters.
        training_data: a dataset, for the data loader that is returned. A dataset that has a length is loaded in an
            order that does not depend on the number of ranks, and its cursor is in every commit: see
            run/data_loader.py.
        lr_scheduler: a scheduler made for `optimizer`, or a callable from the optimizer to one.
        distributed_port: the port of the rendezvous, if the environment has no MASTER_PORT.
        dist_init_required: True: initialise torch.distributed; False: it is initialised; None: initialise it if needed.
        collate_fn: the function with which the data loader makes a batch of samples.
        config, config_params: the config, as a dict or the path of a JSON file: two names of one argument.
        weights: a safetensors file, or a directory with model.safetensors or model.safetensors.index.json, with the
            values that a new job begins with. Each rank reads its own parts. (On a resume, buffers are read from it.)
        strict_weights: whether files and model must have the same names. False: values that the files lack keep their
            initial values, and values that the model lacks are left out.
        param_init_fn: a function that initialises the own parameters and buffers of a module on the meta device, in
            place (as FSDP's); None: the module's `reset_parameters()`, then `_init_weights(module)` of the transformers
            model around it.
        unit_policy: a function from the model to the modules that are gathered and released as a whole; None:
            `paramserver.units`.
        prefer_streams: whether to move tensors over gRPC although the store is on this node (for tests of that path).

    Returns:
        (engine, optimizer, data loader or None, scheduler or None)

    Raises:
        ConfigError: an argument or a config key cannot be honoured.
        RankMismatchError: the ranks differ in config, model, optimizer or arguments; every rank raises the same
            message.
        StoreError, LocalDaemonError: the store refused, cannot be reached or cannot be started.
    """
    refused = {"mpu": mpu, "mesh_param": mesh_param}
    if given := [name for name, value in refused.items() if value is not None]:
        raise ConfigError(
            f"initialize({given[0]}=...) is not honoured by this version: it has data parallelism only (ZeRO)"
        )
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
        # This comes first, because ranks that differ would wait for each other, or for a daemon that none of them
        # starts.
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
        # The process group is left before the daemon is stopped. After an error here, other ranks in a collective with
        # this one fail at once then, and end their sessions, for which the end of the daemon waits.
        resources.callback(processes.close)
        initial_values = InitialValues(
            model,
            parameters,
            collectives,
            param_init_fn=param_init_fn,
            weights=Weights(weights) if weights is not None else None,
            strict_weights=strict_weights,
        )
        user = UserObjects(
            module=model,
            parameters=parameters,
            optimizer=store_optimizer,
            lr_scheduler=scheduler,
            data=loader if isinstance(loader, TrainingLoader) else None,
        )
        rank = RankContext(
            settings=settings, local_rank=local_rank, collectives=collectives, store=store, recorder=recorder
        )
        job = Job(user, rank, policy, initial_values)
        engine = make_engine(user, rank, job, batch, resources)
    return engine, store_optimizer, loader, scheduler


def _config_source(
    args: Any, config: Mapping[str, Any] | str | Path | None, config_params: Mapping[str, Any] | str | Path | None
) -> Mapping[str, Any] | str | Path:
    """Return the config from the argument that gives it. Raises ConfigError for none, or for two."""
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
    """Return the scheduler that drives `optimizer`, which was made of the user's `original`."""
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


def _join_processes(required: bool | None, port: int, processes: ExitStack) -> tuple[int, torch.device]:
    """Join the process group that the launcher has announced, if any. Return (local rank, device)."""
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
    """Open a session with the operator's daemon, or with one that the first rank of this node starts. A collective."""
    address = settings.store_address(os.environ)
    credentials = NO_CREDENTIALS if address is None else settings.credentials(os.environ)
    if address is None:
        failure: LocalDaemonError | None = None
        if local_rank == 0:
            try:
                resources.callback(LocalDaemon(settings).stop)
            except LocalDaemonError as error:
                failure = error
        # The other ranks connect only after this collective, because the socket of an earlier daemon may have been
        # there until now.
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
