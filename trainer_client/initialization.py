"""`initialize`: from a model and a config to an engine, step by step, and everything undone if a step fails.

Owns the order of things. Must never leave a daemon, a session or a process group behind after an error.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client import client_state
from trainer_client.channel import wait_until_serving
from trainer_client.collectives import Collectives
from trainer_client.config import BatchSizes, TrainingConfig, load_config, resolve_batch_sizes
from trainer_client.credentials import NO_CREDENTIALS
from trainer_client.engine import Engine, Scheduler
from trainer_client.errors import ConfigError, JobConflictError, LocalDaemonError
from trainer_client.gradients import Gradients
from trainer_client.hooks import UnitHooks
from trainer_client.local_daemon import LocalDaemon, local_address
from trainer_client.optimizer import OptimizerArgument, StoreOptimizer, make_optimizer
from trainer_client.precision import LossScaler, PrecisionPolicy
from trainer_client.rank_store import RankStore
from trainer_client.trace import Clock
from trainer_client.units import PROTO_DTYPES, ModelParameter, Placement, Unit, find_units, list_parameters

log = logging.getLogger(__name__)

SchedulerArgument = LRScheduler | Callable[[torch.optim.Optimizer], Scheduler] | None

_SERVING_SECONDS = 30.0
_ID_BYTES = 16

# Of the store's host tier, all ranks together have this part (1 / it) filled ahead of use.
_PREFETCH_SHARE = 8

_TIERS: Mapping[str, pb.Tier] = {"cpu": pb.TIER_HOST, "nvme": pb.TIER_NVME}
_RESUME_POLICIES: Mapping[str, pb.ResumePolicy] = {
    "auto": pb.RESUME_POLICY_AUTO,
    "never": pb.RESUME_POLICY_NEVER,
    "must": pb.RESUME_POLICY_MUST,
}


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
    prefer_streams: bool = False,
) -> tuple[Engine, StoreOptimizer, DataLoader[Any] | None, Scheduler | None]:
    """Starts or resumes a training job. DeepSpeed's signature and return value; every rank calls it alike.

    Args:
        args: its `deepspeed_config` is the config's path if `config` is None.
        model: floating-point parameters, on the CPU. Afterwards they live in the store. On a new job, rank 0's initial
            values count; on a resume the initial values do not matter.
        optimizer: a fresh `torch.optim.AdamW`, or a callable from parameters to one; None: the config's.
        model_parameters: what to optimise, as parameters or parameter groups; None: all trainable ones.
        training_data: a dataset, for the data loader that is returned.
        lr_scheduler: a scheduler made for `optimizer`, or a callable from the optimizer to one.
        distributed_port: of the rendezvous, where the environment has no MASTER_PORT.
        dist_init_required: True: initialise torch.distributed; False: it is initialised; None: as needed.
        collate_fn: for the data loader.
        config, config_params: a dict or the path of a JSON file; two names of one argument.
        prefer_streams: move tensors over gRPC although the store is on this node (for tests of that path).

    Returns:
        (engine, optimizer, data loader or None, scheduler or None)

    Raises:
        ConfigError: an argument or a config key that cannot be honoured.
        StoreError, LocalDaemonError: the store refused, cannot be reached or cannot be started.
    """
    refused = {"mpu": mpu, "mesh_param": mesh_param}
    if given := [name for name, value in refused.items() if value is not None]:
        raise ConfigError(f"initialize({given[0]}=...) is not honoured by this version: parallelism is ZeRO-3 only")
    if model is None:
        raise ConfigError("initialize(model=None): pass the model")
    settings = load_config(_config_source(args, config, config_params), os.environ)
    parameters = list_parameters(model)
    store_optimizer = make_optimizer(optimizer, settings.optimizer, model_parameters, parameters)
    scheduler = _make_scheduler(lr_scheduler, optimizer, store_optimizer)
    with ExitStack() as resources:
        processes = resources.enter_context(ExitStack())
        local_rank, device = _join_processes(dist_init_required, distributed_port, processes)
        collectives = Collectives(device)
        batch = resolve_batch_sizes(settings, collectives.world_size)
        store = _connect(settings, collectives, local_rank, prefer_streams, resources)
        # Left before the daemon is stopped: after an error here, peers in a collective with this rank fail at once and
        # end their sessions, which the daemon's end waits for.
        resources.callback(processes.close)
        job = _Job(settings, model, parameters, store, collectives)
        engine = job.start(store_optimizer, scheduler, batch, local_rank, resources)
    return engine, store_optimizer, _make_loader(training_data, batch, collectives, collate_fn), scheduler


class _Job:
    """One job being opened by one rank: declared, filled or rolled back, and handed to an engine."""

    def __init__(
        self,
        settings: TrainingConfig,
        model: nn.Module,
        parameters: Sequence[ModelParameter],
        store: RankStore,
        collectives: Collectives,
    ) -> None:
        self._settings = settings
        self._model = model
        self._parameters = parameters
        self._store = store
        self._collectives = collectives
        self._policy = PrecisionPolicy.of(settings)
        specs = find_units(model, parameters)
        self._units = [Unit(i, spec, self._policy, store, collectives) for i, spec in enumerate(specs)]
        # Ranks that see the same start of a daemon share a store.
        epoch = hashlib.sha256(store.epoch.encode()).digest()[:_ID_BYTES]
        self._store_ranks = [rank for rank, e in enumerate(collectives.gather_ids(epoch)) if e == epoch]

    def start(
        self,
        optimizer: StoreOptimizer,
        scheduler: Scheduler | None,
        batch: BatchSizes,
        local_rank: int,
        resources: ExitStack,
    ) -> Engine:
        """An engine at the newest step that all ranks have committed, or at step 0 of a new job. A collective."""
        committed = {step.step: step.client_state for step in self._open()}
        resumed = self._agree_on(list(committed))
        if resumed is None:
            self._write_initial_values()
        else:
            self._roll_back(resumed)
        for unit in self._units:
            for group in unit.groups:
                group.take_over()
        _move_buffers(self._model, self._collectives.device)
        engine = self._engine(optimizer, scheduler, batch, local_rank, resources)
        try:
            if resumed is None:
                engine.commit_initial_state()
            else:
                engine.load_client_state(resumed, client_state.decode(committed[resumed]))
        except BaseException:
            engine.close()
            raise
        return engine

    def _open(self) -> Sequence[pb.CommittedStep]:
        """Attaches to the job and declares this rank's shard groups; the committed steps."""
        section = self._settings.paramserver
        dtype = PROTO_DTYPES[self._policy.compute_dtype]
        committed = self._store.open_job(
            pb.OpenJobRequest(
                job=section.job,
                run_id=self._collectives.broadcast_id(secrets.token_bytes(_ID_BYTES)).hex(),
                rank=self._collectives.rank,
                world_size=self._collectives.world_size,
                attached_ranks=len(self._store_ranks),
                parameters=[
                    pb.Parameter(fqn=p.fqn, shape=p.shape, dtype=dtype, trainable=p.tensor.requires_grad)
                    for p in self._parameters
                ],
                durability=_durability(section.durability),
                resume=_RESUME_POLICIES[section.resume],
            )
        )
        zero = self._settings.zero_optimization
        placement = Placement(param=_TIERS[zero.offload_param.device], optimizer=_TIERS[zero.offload_optimizer.device])
        self._store.register_shards(group.to_proto(placement) for unit in self._units for group in unit.groups)
        return committed

    def _agree_on(self, steps: Sequence[int]) -> int | None:
        """The newest step that every rank has; None if the job is new on every rank."""
        newest = self._collectives.newest_common_step(steps)
        if newest is None and any(self._collectives.any_rank([bool(steps)])):
            raise JobConflictError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"job {self._settings.paramserver.job!r} has no step that all ranks have committed (this one: "
                f"{list(steps)}): a node's state is missing; restore it, or delete the job on every node",
            )
        return newest

    def _write_initial_values(self) -> None:
        """Stages this rank's chunks of rank 0's weights as step 0. A collective."""
        for unit in self._units:
            for group in unit.groups:
                chunk = group.initial_chunk()
                kinds = [pb.KIND_PARAM, pb.KIND_MASTER] if group.has_master else [pb.KIND_PARAM]
                leases = self._store.acquire_write([group.slab(kind) for kind in kinds], step=0).wait()
                for kind, leased in zip(kinds, leases, strict=True):
                    leased.data.view(torch.float32 if kind == pb.KIND_MASTER else group.dtype).copy_(chunk)
                self._store.publish(leases)

    def _roll_back(self, step: int) -> None:
        """Makes `step` the newest one of every store. A collective."""
        if self._store_ranks[0] == self._collectives.rank:
            self._store.roll_back(step)
        self._collectives.barrier()
        if self._collectives.rank == 0:
            log.info("job %r resumes from step %d", self._settings.paramserver.job, step)

    def _engine(
        self,
        optimizer: StoreOptimizer,
        scheduler: Scheduler | None,
        batch: BatchSizes,
        local_rank: int,
        resources: ExitStack,
    ) -> Engine:
        gradients = Gradients(self._units, self._store, self._collectives)
        clock = Clock()
        hooks = UnitHooks(
            units=self._units,
            gradients=gradients,
            store=self._store,
            compute_dtype=self._policy.compute_dtype,
            clock=clock,
            prefetch_bytes=self._store.arena_bytes // (_PREFETCH_SHARE * len(self._store_ranks)),
        )
        hooks.install()
        return Engine(
            module=self._model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            parameters=self._parameters,
            units=self._units,
            gradients=gradients,
            hooks=hooks,
            store=self._store,
            collectives=self._collectives,
            scaler=LossScaler(self._settings.fp16),
            clock=clock,
            batch=batch,
            gradient_clipping=self._settings.gradient_clipping,
            steps_per_print=self._settings.steps_per_print,
            local_rank=local_rank,
            resources=resources.pop_all(),
        )


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
    settings: TrainingConfig, collectives: Collectives, local_rank: int, prefer_streams: bool, resources: ExitStack
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
    store = RankStore(address, client, credentials, prefer_streams=prefer_streams)
    resources.callback(store.close)
    log.info("rank %d: store daemon at %s, data plane: %s", collectives.rank, address, store.plane.name)
    return store


def _durability(text: str) -> pb.Durability:
    durability = pb.Durability()
    name, _, every = text.partition(":")
    if name == "snapshot":
        durability.snapshot.every_steps = int(every)
    else:
        getattr(durability, name).SetInParent()
    return durability


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _make_loader(
    dataset: Dataset[Any] | None,
    batch: BatchSizes,
    collectives: Collectives,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any] | None:
    if dataset is None:
        return None
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=collectives.world_size, rank=collectives.rank)
    return DataLoader(dataset, batch_size=batch.micro, sampler=sampler, collate_fn=collate_fn)
