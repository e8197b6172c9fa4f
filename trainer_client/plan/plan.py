"""A plan of a job: its layout, memory and bounds of a step for one config, and similar configs that fit or are faster.

This module owns the order in which these are computed. It must never measure or print.
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
# A suggested budget is larger than the need by this factor, because a job needs more in some steps than in others.
_SPARE = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """The job that is planned, and the machine that it is planned for.

    Attributes:
        build: returns the model without memory.
        rehearse: returns the rehearsal of a micro-batch of this size in a dtype (None: the model's own), with the rule
            by which boundaries of activation checkpoints leave the device (None: they stay), and under autocast in
            another dtype (None: without it).
        world: the ranks and nodes of the job.
        capacities: the bytes that one rank and one node have.
        rates: the rates of the machine.
        sequence: the number of tokens of one sample.
        device: "cpu" or "cuda".
        find_need, find_hits: the store's figures, which only the daemon's side can compute.
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
    """A config with its layout, memory and bounds of a step. `settings` has the config's values, with defaults."""

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
        """The dtype of the parameters that ranks compute with; None if it is the model's own."""
        return PrecisionPolicy.of(self.settings).compute_dtype

    @property
    def fits(self) -> bool:
        """Whether the machine and the budgets have room for the job."""
        return not self.shortages


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change of a config that makes the job fit."""

    what: str
    plan: Plan


def plan(job: PlannedJob, raw: Raw, world: World | None = None) -> Plan:
    """Return the plan of a config.

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
    """Return the first change of a config that makes the job fit; None if none of the changes that are tried does.

    Fewer changed keys come first: budgets, then one placement, then the stage, smaller micro-batches, more ranks.
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

    The middle between the two bounds of the step is compared. By the lower bound alone, all placements would be equal
    whose computation takes longest, however many bytes they move beside it. If the steps of several placements take
    equally long, the one with the least host memory is chosen.
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
    """Return the plan with budgets of the store that the job needs, as far as the machine has them.

    The host budget has room for all gradients of a step, for all parameters that pass through host memory, and for the
    boundaries of checkpoints, if the machine has it.
    """
    need, memory = tried.memory.store, tried.memory
    ranks = tried.world.ranks
    left = job.capacities.host - (memory.node_host_bytes(ranks) - memory.host_budget)
    # Boundaries stay in host memory if they take at most half of what the rest of a step leaves there.
    wanted = _mebibytes(need.ample_host_budget + need.passing_bytes + 2 * need.boundary_bytes)
    host = max(_mebibytes(need.least_host_budget), min(wanted, left // MIB * MIB))
    raw = copy.deepcopy(dict(tried.config))
    section = raw.setdefault("paramserver", {})
    section["host_budget"] = least_size(host)
    nvme = tried.layout.store_need(job.find_need, host, memory.boundaries).nvme_bytes
    section["nvme_budget"] = least_size(max(256 * MIB, int(nvme * _SPARE)))
    return plan(job, raw, tried.world)


def placed(raw: Raw, stage: int, parameters: str, optimizer: str) -> dict[str, Any]:
    """Return a config with another stage and other homes, written as `paramserver.placement`."""
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
    # The ranks of more nodes take as many samples each, so a step has more of them.
    each = {key: value for key, value in raw.items() if key != "train_batch_size"}
    each["train_micro_batch_size_per_gpu"] = failing.batch.micro
    each["gradient_accumulation_steps"] = failing.batch.accumulation
    for factor in (2, 4, 8, 16):
        more = World(ranks=world.ranks, nodes=world.nodes * factor)
        yield f"{more.nodes} nodes, with this config", each, more
        yield f"{more.nodes} nodes, stage 3 with everything on nvme", placed(each, 3, "nvme", "nvme"), more


def _mebibytes(nbytes: int) -> int:
    """Return the bytes rounded up to whole MiB."""
    return -(-nbytes // MIB) * MIB
