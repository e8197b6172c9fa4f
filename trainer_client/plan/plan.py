"""A plan of a job: its layout, memory and bounds of a step for one config, and similar configs that fit or are faster.

This module calls the others of this package in their order. It must never measure or print.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paramserver.contract.device_reads import FindHits
from paramserver.contract.sizes import least_size
from paramserver.contract.store_need import FindNeed
from trainer_client.config.batch_sizes import BatchSizes, resolve_batch_sizes
from trainer_client.config.loading import load_config
from trainer_client.config.training_config import TrainingConfig
from trainer_client.errors import ConfigError
from trainer_client.plan.boundaries import OffloadRule
from trainer_client.plan.device_copies import NO_COPIES, plan_copies
from trainer_client.plan.layout import Layout, World, gathers_one_sided, lay_out
from trainer_client.plan.machine import Capacities, KnownRates
from trainer_client.plan.memory import MIB, MemoryPlan, Shortage, plan_memory
from trainer_client.plan.rehearsal import Rehearsal
from trainer_client.plan.step_time import StepTime, find_traffic, predict
from trainer_client.training.step.precision import PrecisionPolicy

Raw = Mapping[str, Any]
# A suggested NVMe budget is larger than the planned need by this factor, because a job needs more in some steps than in
# others.
_SPARE = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """The job that is planned, and the machine on which it is to run.

    Attributes:
        build: returns the model without memory.
        rehearse: returns the rehearsal of a micro-batch. Its arguments are the number of samples, the dtype of the
            parameters (None: the model's own), the rule by which boundaries of activation checkpoints leave the device
            (None: they stay), and the dtype of autocast (None: without autocast).
        world: the ranks and nodes of the job.
        capacities: the bytes that one rank and one node have.
        rates: the rates of the machine.
        sequence: the number of tokens of one sample.
        device: "cpu" or "cuda".
        find_need, find_hits: the daemon's functions for the bytes that a job takes in a store, and for the reads that
            device copies serve. The client's packages cannot import them, so the caller passes them.
    """

    build: Callable[[], nn.Module]
    rehearse: Callable[[int, torch.dtype | None, OffloadRule | None, torch.dtype | None], Rehearsal]
    world: World
    capacities: Capacities
    rates: KnownRates
    find_need: FindNeed
    find_hits: FindHits
    sequence: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan for one config: the job's layout, the memory that it takes, and the bounds of a step's time.

    `config` is the config as the user would write it, and `settings` has all of its values, with the defaults.
    """

    config: Raw
    settings: TrainingConfig
    world: World
    batch: BatchSizes
    layout: Layout
    rehearsal: Rehearsal
    memory: MemoryPlan
    time: StepTime
    shortages: tuple[Shortage, ...]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the parameters with which ranks compute; None if it is the model's own."""
        return PrecisionPolicy.of(self.settings).compute_dtype

    @property
    def fits(self) -> bool:
        """Whether the machine and the budgets have room for the job."""
        return not self.shortages


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change of a config that makes the job fit: what is changed, and the plan with the changed config."""

    what: str
    plan: Plan


def plan(job: PlannedJob, raw: Raw, world: World | None = None) -> Plan:
    """Return the plan of a job with a config: its layout, its memory, and the bounds of a step's time.

    Raises:
        ConfigError: the config or the model would be refused.
    """
    world = job.world if world is None else world
    model = job.build()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    config = load_config(raw, {}, dtypes)
    batch = resolve_batch_sizes(config, world.size)
    layout = lay_out(model, config, world)
    precision = PrecisionPolicy.of(config)
    rehearsal = job.rehearse(batch.micro, precision.compute_dtype, OffloadRule.of(config), precision.autocast_dtype)
    is_cpu = job.device == "cpu"
    copies = NO_COPIES
    if not is_cpu:
        partitions = world.size if gathers_one_sided(layout, config, is_cpu=False) else 1
        budget = int(config.paramserver.gpu_budget)
        copies = plan_copies(layout, budget, batch.accumulation, job.find_hits, partitions)
    memory = plan_memory(job.device, layout, config, rehearsal, job.find_need, copies, batch.accumulation)
    traffic = find_traffic(layout, memory, config, batch.accumulation, copies, is_cpu=is_cpu)
    time = predict(
        traffic,
        job.rates.of(world),
        ranks=world.ranks,
        compute_seconds=batch.accumulation * job.rates.compute_seconds(rehearsal),
        tokens=batch.train * job.sequence,
        is_cpu=is_cpu,
    )
    return Plan(
        config=raw,
        settings=config,
        world=world,
        batch=batch,
        layout=layout,
        rehearsal=rehearsal,
        memory=memory,
        time=time,
        shortages=tuple(memory.shortages(job.capacities, world.ranks)),
    )


def smallest_change(job: PlannedJob, failing: Plan) -> Suggestion | None:
    """Return the first change of a config that makes the job fit; None if no change that is tried does so.

    Changes of fewer keys are tried first: budgets, then one placement, then the stage, smaller micro-batches, and at
    last more nodes.
    """
    for what, raw, world in _changes(failing):
        try:
            tried = with_budgets(job, plan(job, raw, world))
        except ConfigError:
            continue
        if tried.fits:
            return Suggestion(what=what, plan=tried)
    return None


def best_placement(job: PlannedJob, raw: Raw) -> Plan | None:
    """Return the plan with the shortest step of all placements, at all stages, that fit; None if none fits.

    Placements are compared by the mean of the lower and the upper bound of the step's seconds. The lower bound is the
    time of the slowest resource. If that is the computation, it is the same for all placements, however many bytes they
    move. If the means of several placements are equal, the placement with the least host memory is chosen.
    """
    fitting = []
    for stage, parameters, optimizer in _placements():
        try:
            tried = with_budgets(job, plan(job, placed(raw, stage, parameters, optimizer)))
        except ConfigError:
            continue
        if tried.fits:
            fitting.append(tried)

    def cost(tried: Plan) -> tuple[float, int]:
        middle = (tried.time.overlapped_seconds + tried.time.serial_seconds) / 2
        return round(middle, 3), tried.memory.node_host_bytes(tried.world.ranks)

    return min(fitting, key=cost, default=None)


def with_budgets(job: PlannedJob, tried: Plan) -> Plan:
    """Return the plan with the budgets of the store that the job needs, as far as the machine has room.

    If the machine has enough host memory, the host budget has room for all gradients of a step, for all parameters that
    pass through host memory, and for the boundaries of activation checkpoints.
    """
    need, memory = tried.memory.store, tried.memory
    ranks = tried.world.ranks
    left = job.capacities.host - (memory.node_host_bytes(ranks) - memory.host_budget)
    # The bytes of boundaries count twice, because the store keeps boundaries in host memory only if they take at most
    # half of the room that the rest of a step leaves.
    wanted = _mebibytes(need.ample_host_budget + need.passing_bytes + 2 * need.boundary_bytes)
    host = max(_mebibytes(need.least_host_budget), min(wanted, left // MIB * MIB))
    raw = copy.deepcopy(dict(tried.config))
    section = raw.setdefault("paramserver", {})
    section["host_budget"] = least_size(host)
    nvme = tried.layout.store_need(job.find_need, host, memory.boundaries).nvme_bytes
    section["nvme_budget"] = least_size(max(256 * MIB, int(nvme * _SPARE)))
    return plan(job, raw, tried.world)


def placed(raw: Raw, stage: int, parameters: str, optimizer: str) -> dict[str, Any]:
    """Return a copy of a config with another stage, and with other homes in `paramserver.placement`."""
    changed = copy.deepcopy(dict(raw))
    zero = dict(changed.get("zero_optimization", {}))
    paths = [zero.pop(key, {}).get("nvme_path") for key in ("offload_param", "offload_optimizer") if zero.get(key)]
    zero.pop("offload_param", None)
    zero.pop("offload_optimizer", None)
    changed["zero_optimization"] = zero | {"stage": stage}
    section = changed.setdefault("paramserver", {})
    section["placement"] = {"parameters": parameters, "optimizer": optimizer}
    if (path := next(filter(None, paths), None)) is not None:
        section.setdefault("state_dir", path)
    return changed


def _placements() -> Iterator[tuple[int, str, str]]:
    yield 0, "device", "device"
    for stage in (1, 2, 3):
        for parameters in ("device", "host", "nvme") if stage == 3 else ("device",):
            for optimizer in ("device", "host", "nvme"):
                yield stage, parameters, optimizer


def _changes(failing: Plan) -> Iterator[tuple[str, Raw, World]]:
    raw, world = failing.config, failing.world
    present = failing.layout.groups[0].placement
    stage = failing.settings.zero_optimization.stage
    parameters, optimizer = present.parameters.value, present.optimizer.value
    yield "set the budgets of the store", raw, world
    for home in ("host", "nvme"):
        if stage and home != optimizer:
            yield f"place the optimizer states on {home}", placed(raw, stage, parameters, home), world
    for home in ("host", "nvme"):
        if stage == 3 and home != parameters:
            yield f"place the parameters on {home}", placed(raw, stage, home, optimizer), world
    for home in ("host", "nvme"):
        yield f"stage 3 with optimizer states on {home}", placed(raw, 3, "device", home), world
        yield f"stage 3 with everything on {home}", placed(raw, 3, home, home), world
    if failing.batch.micro > 1:
        smaller = {**placed(raw, 3, "nvme", "nvme"), "train_micro_batch_size_per_gpu": 1}
        smaller["gradient_accumulation_steps"] = failing.batch.micro * failing.batch.accumulation
        smaller.pop("train_batch_size", None)
        yield "stage 3 with everything on nvme, and micro-batches of one sample", smaller, world
    # With more nodes, each rank still has the same number of samples, so a step has more samples. So the config for
    # more nodes is without `train_batch_size`.
    each = {key: value for key, value in raw.items() if key != "train_batch_size"}
    each["train_micro_batch_size_per_gpu"] = failing.batch.micro
    each["gradient_accumulation_steps"] = failing.batch.accumulation
    for factor in (2, 4, 8, 16):
        more = World(ranks=world.ranks, nodes=world.nodes * factor)
        yield f"{more.nodes} nodes, with this config", each, more
        yield f"{more.nodes} nodes, stage 3 with everything on nvme", placed(each, 3, "nvme", "nvme"), more


def _mebibytes(nbytes: int) -> int:
    """Return `nbytes`, rounded up to whole MiB, as the value of a budget in a config."""
    return -(-nbytes // MIB) * MIB
