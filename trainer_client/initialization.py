"""`initialize`: its arguments are checked and read, and engine/start.py makes an engine of them.

This module owns the meaning of the arguments. It must never open anything.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from trainer_client import comm
from trainer_client.config.loading import load_config
from trainer_client.config.log_lines import describe_without_effect
from trainer_client.config.tiling import TilingSection
from trainer_client.config.training_config import TrainingConfig
from trainer_client.engine.engine import Engine
from trainer_client.engine.start import EngineStart, InitialArguments, SchedulerArgument, set_local_rank
from trainer_client.errors import ConfigError
from trainer_client.inference.engine import InferenceEngine
from trainer_client.inference.opening import open_engine
from trainer_client.inference.whole_engine import WholeEngine, open_whole_engine
from trainer_client.interface_version import log_version
from trainer_client.schedules.registry import make_schedule
from trainer_client.schedules.schedule import ScheduleSection
from trainer_client.training.data_parallel import check_mpu
from trainer_client.training.initial.deferred_init import RecipeRecorder
from trainer_client.training.initial.module_init import ParamInitFn
from trainer_client.training.model.leaves import mark_configured_leaves
from trainer_client.training.model.owners import is_owned, owner_of
from trainer_client.training.model.parameters import ModelParameter, list_parameters
from trainer_client.training.model.registered import external_parameters
from trainer_client.training.model.unit_policy import UnitPolicy, choose_policy
from trainer_client.training.run.forgotten import collect_forgotten
from trainer_client.training.run.job_choice import naming_its_jobs
from trainer_client.training.run.run_state import Scheduler
from trainer_client.training.run.schedule_state import rates_of, restore_rates
from trainer_client.training.step.precision import PrecisionPolicy
from trainer_client.training.store_optimizer import OptimizerArgument, StoreOptimizer, make_optimizer

log = logging.getLogger(__name__)


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
        optimizer: a fresh optimizer, of a class that `docs/optimizers.md` lists, or a callable from
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
        mpu: DeepSpeed's object that describes model parallelism; it is accepted if it splits nothing but the data.
        dist_init_required: True: initialise torch.distributed; False: it is initialised; None: initialise it if needed.
        collate_fn: the function with which the data loader makes a batch of samples.
        config, config_params: the config, as a dict or the path of a JSON file: two names of one argument.
        weights: a safetensors file, or a directory with model.safetensors or model.safetensors.index.json, with the
            values that a new job begins with. Each rank reads its own parts. (On a resume, those
            buffers are read from it that the commit does not have.)
        strict_weights: whether files and model must have the same names. False: values that the files lack keep their
            initial values, and values that the model lacks are left out.
        checkpoint: a checkpoint of DeepSpeed or another framework, as for `paramserver import`: a path or a URL. A job
            that has no step yet, nor a replica with one, goes on from it, with its optimizer states and counters. For
            a job that has a step, and where `paramserver.resume` is "must", `checkpoint` has no effect.
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
    initial = InitialArguments(weights, strict_weights, param_init_fn, _former_engines(parameters))
    _mark(model, settings)
    processes = (dist_init_required, distributed_port)
    if optimizer is None and settings.optimizer is None:
        _refuse_for_inference(training_data=training_data, lr_scheduler=lr_scheduler, checkpoint=checkpoint)
        without_optimizer = _open_without_optimizer(
            model, parameters, settings, policy, initial, processes=processes, prefer_streams=prefer_streams
        )
        set_local_rank(args, without_optimizer.local_rank)
        # If the call gives no optimizer, None is returned in its place. The declared type is an optimizer nonetheless,
        # because only the config decides whether there is one, and training loops would otherwise have to check for
        # None.
        returned: Any = (without_optimizer, None, None, None)
        result: tuple[Engine, StoreOptimizer, None, None] = returned
        return result
    store_optimizer = make_optimizer(
        optimizer, settings.optimizer, model_parameters, parameters, settings.paramserver.may_thaw
    )
    scheduler = _make_scheduler(lr_scheduler, settings.scheduler, optimizer, store_optimizer)
    start = EngineStart(
        model=model,
        parameters=parameters,
        settings=settings,
        policy=policy,
        optimizer=store_optimizer,
        scheduler=scheduler,
        initial=initial,
        training_data=training_data,
        collate_fn=collate_fn,
        lr_scheduler=lr_scheduler,
        checkpoint=checkpoint,
        unit_policy=unit_policy,
    )
    engine, loader = start.open_engine(args, processes, prefer_streams=prefer_streams)
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
    """Mark in the model, as the config asks, what the engine later treats differently.

    These are the modules that are gathered as a whole, and the parameters whose gradients are added over the ranks in
    autocast's dtype.
    """
    mark_configured_leaves(model, settings.zero_optimization)
    PrecisionPolicy.of(settings).mark_reductions(model)


def _former_engines(parameters: Sequence[ModelParameter]) -> list[Engine]:
    """Return the open engines that parameters of the model belong to, in the order of the parameters.

    Engines to which the program has no reference any more are garbage-collected first, so they are not returned.

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
    """Return the engine for a model without optimizer: at stage 3 it leases from the store, else the model is whole."""
    if comm.get_rank() == 0 and (without_effect := describe_without_effect(settings, os.environ)):
        # The keys without effect are logged at level INFO and not as a warning, because a model without optimizer is
        # mostly the reference model of a training, and has the config of the trained model.
        log.info("%s", without_effect)
    if settings.paramserver.tiling != TilingSection():
        log.warning("paramserver.tiling has no effect without an optimizer: an engine for inference leases whole units")
    if settings.zero_optimization.stage < 3:
        return open_whole_engine(model, parameters, settings, initial, processes)
    return open_engine(model, parameters, settings, policy, initial, processes=processes, prefer_streams=prefer_streams)


def _refuse_for_inference(**arguments: Any) -> None:
    """Raise ConfigError if an argument of `initialize` is given for which an engine for inference has no use."""
    for name, value in arguments.items():
        if value is not None:
            instead = "; write the checkpoint into the store with `paramserver import`" if name == "checkpoint" else ""
            raise ConfigError(
                f"initialize({name}=...) needs an optimizer: without one, the engine is for inference{instead}"
            )


def _config_source(
    args: Any, config: Mapping[str, Any] | str | Path | None, config_params: Mapping[str, Any] | str | Path | None
) -> Mapping[str, Any] | str | Path:
    """Return the config from the one argument of `initialize` that gives it.

    Raises:
        ConfigError: no argument gives a config, or two of them do.
    """
    if config is not None and config_params is not None:
        raise ConfigError("initialize(config=..., config_params=...) are two names of one argument: pass one")
    source = config if config is not None else config_params
    for name in ("deepspeed_config", "deepscale_config"):
        source = getattr(args, name, None) if source is None else source
    if source is None:
        raise ConfigError("no config: pass initialize(config=...), a dict or the path of a JSON file")
    return source


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
