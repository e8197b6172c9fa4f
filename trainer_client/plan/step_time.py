"""The time of a planned step: the bytes that it moves on each link, and two bounds of its seconds.

This module must never measure.

[Note: the bounds] For each resource (compute, and each link, disk or processor that moves or updates bytes), the plan
computes the least seconds that the resource needs for the step: its work divided by its rate. If all resources work at
the same time, the step takes as long as the slowest resource: this is the lower bound. If they work one after another,
the step takes the sum of all their seconds: this is the upper bound. Neither bound includes what has no rate: the
library's own Python, waits, latencies, checksums, and threads that share processors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from paramserver.contract.store_need import StoreNeed
from trainer_client.base.recorder import Link
from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.plan.device_copies import NO_COPIES, PlannedCopies, reads_of_pass
from trainer_client.plan.layout import Layout, PlannedGroup, gathers_one_sided
from trainer_client.plan.machine import Rates
from trainer_client.plan.memory import MemoryPlan
from trainer_client.plan.nodes import UPDATE_BYTES
from trainer_client.training.model.placement import Residence
from trainer_client.training.model.states import is_in_store
from trainer_client.training.report.step_report import COMPUTE
from trainer_client.training.step.gradients import ReductionSchedule

COLLECTIVES = Link.COLLECTIVES.value
NVME = "nvme"
STORE_LINK = "store_link"
STORE_UPDATE = "store_update"
DEVICE_UPDATE = "device_update"
HOST_MEMORY = "host_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that a step moves on each link and disk, from which its time is computed.

    Attributes:
        to_rank, from_rank: the bytes that one rank gets from its store, and sends to it.
        collectives: the bytes of whole buffers that one rank gathers or reduces.
        nvme_read, nvme_written: the bytes that the node's NVMe reads and writes.
        updated: the elements that the node's store updates; `updated_on_device`: the elements that one rank updates on
            its device.
        put: the bytes of states that are on one rank's device and that the rank hands over to the store for commits, on
            average over the steps.
        mapped: the bytes of parameters that one rank maps from its store's memory, so that it need not copy them.
        boundaries: the bytes of boundaries of activation checkpoints that one rank sends to its store, and gets back.
        spilled_boundaries: the bytes of boundaries that the node's NVMe writes, and reads again.
        hit: of the bytes of parameters that pass through host memory, the fraction that is expected to stay in host
            memory between two uses. These are the parameters whose home is NVMe, and those whose home is a device and
            whose states are on NVMe.
        device_hit: of the bytes of parameters that a rank reads, the fraction that it finds in copies on its device.
        states_hit: of the bytes of optimizer states whose home is NVMe, the fraction that is expected to stay in host
            memory from one update to the next.
    """

    to_rank: int
    from_rank: int
    collectives: int
    nvme_read: int
    nvme_written: int
    updated: int
    updated_on_device: int
    put: int
    mapped: int
    boundaries: int
    spilled_boundaries: int
    hit: float
    device_hit: float
    states_hit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The bounds of the time of a step; see [Note: the bounds].

    Attributes:
        resources: the least seconds that each resource needs.
        tokens: the tokens of one step on all ranks.
        traffic: the bytes that the step moves.
    """

    resources: Mapping[str, float]
    tokens: int
    traffic: Traffic

    @property
    def binding(self) -> str:
        """The name of the resource that needs the most seconds for a step, and so gives the lower bound."""
        return max(self.resources, key=lambda name: self.resources[name])

    @property
    def overlapped_seconds(self) -> float:
        """The lower bound of the step's seconds, in which all resources work at the same time."""
        return self.resources[self.binding]

    @property
    def serial_seconds(self) -> float:
        """The upper bound of the step's seconds, in which the resources work one after another."""
        return sum(self.resources.values())

    @property
    def hiding_tokens(self) -> int | None:
        """The fewest tokens of a step with which compute takes at least as long as each part of the store's work.

        The parts are NVMe, the link to the store, the store's updates, and host memory. The value is None if none of
        them has any work, or if compute takes no time.
        """
        names = (NVME, STORE_LINK, STORE_UPDATE, HOST_MEMORY)
        hidden = max(self.resources.get(name, 0.0) for name in names)
        compute = self.resources[COMPUTE]
        return int(self.tokens * hidden / compute) if hidden and compute else None


def find_traffic(
    layout: Layout,
    memory: MemoryPlan,
    config: TrainingConfig,
    micro_batches: int,
    copies: PlannedCopies = NO_COPIES,
    *,
    is_cpu: bool,
) -> Traffic:
    """Return the bytes that a step of `micro_batches` moves, on average.

    Args:
        copies: the copies of parameters on a rank's device. A read that finds its bytes there moves nothing.
    """
    ranks = layout.world.ranks
    rules = _Rules(
        several=layout.world.size > 1,
        is_cpu=is_cpu,
        one_sided=gathers_one_sided(layout, config, is_cpu=is_cpu),
        reductions=micro_batches if ReductionSchedule.of(config) is ReductionSchedule.MICRO_BATCH else 1,
    )
    need = memory.store
    # Units are gathered whole. So if the backward pass reads a unit again, the unit's frozen groups are counted again.
    reads = Counter(unit.fqn for unit in reads_of_pass(layout.units))
    total: Counter[str] = Counter()
    for unit in layout.units:
        for planned in unit.groups:
            if planned.placement.residence is Residence.SHARDED:
                total.update(_gathered(planned, micro_batches * reads[unit.fqn], rules))
            if planned.group.trainable:
                total.update(_trained(planned, unit.uses, rules))
    # If the store makes some updates, each step is committed, and ranks hand over the states that they have updated. If
    # not, only the steps are committed that the durability class asks for (training/run/commits.py).
    every = config.paramserver.durable_every
    in_store = any(is_in_store(planned) for planned in layout.groups)
    put = int(total["put"] * (1.0 if in_store else 1.0 / every if every else 0.0))
    written = need.updated_bytes + (need.volatile_bytes // every if every else 0) if in_store else put * ranks
    boundaries = sum(memory.boundaries) * micro_batches
    # `through` has the bytes of parameters that pass through host memory in a step, on their way from NVMe. Of
    # parameters whose home is the device, only those count whose optimizer states are on NVMe ("reread"), because the
    # store keeps them where their states are, and reads them once in a step, for the update.
    through = ranks * (total["reread"] + sum(p.group.partition_bytes for p in layout.groups if _is_read_from_nvme(p)))
    hit = _part(memory.free_host_budget, through)
    fetched = int(ranks * (total["passing"] * (1.0 - copies.hit) + total["reread"]) * (1.0 - hit))
    # An update leaves host copies of optimizer states for the next update. They take the room that is left beside
    # parameters: the store evicts them first, because it knows the next use of parameters.
    states = total["states"] * ranks
    states_hit = _part(max(0, memory.free_host_budget - through), states)
    # Boundaries that do not fit into the host budget are written to NVMe in each forward, and read in the backward
    # pass.
    spilled_boundaries = need.spilled_boundary_bytes * micro_batches
    # Several ranks send gradients to the store at each reduction, so spilled gradients are counted once for each.
    sums = rules.reductions if rules.several else micro_batches
    spilled = _spilled_gradients(need, total, config, sums if is_cpu else 1) + spilled_boundaries
    return Traffic(
        to_rank=int(total["leased"] * (1.0 - copies.hit)) + total["returned"] + boundaries,
        from_rank=total["sent"] + put + boundaries,
        collectives=total["collectives"],
        nvme_read=int(states * (1.0 - states_hit)) + fetched + spilled,
        nvme_written=spilled + written,
        updated=total["updated"] * ranks,
        updated_on_device=total["on_device"],
        put=put,
        mapped=total["mapped"],
        boundaries=boundaries,
        spilled_boundaries=spilled_boundaries,
        hit=hit,
        device_hit=copies.hit,
        states_hit=states_hit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """The properties of a job that decide which bytes a step moves for each of its flat groups.

    Attributes:
        several: whether the job has several ranks.
        is_cpu: whether ranks compute on the CPU.
        one_sided: whether each rank reads the partitions of all ranks from its store's memory, without a collective.
        reductions: how often a step reduces each gradient over the ranks.
    """

    several: bool
    is_cpu: bool
    one_sided: bool
    reductions: int


def _gathered(planned: PlannedGroup, uses: int, rules: _Rules) -> dict[str, int]:
    """Return the bytes that one rank moves in a step to gather the parameters of a sharded group `uses` times.

    The keys are: "leased", from the store to the rank; "passing", the part of a group on NVMe that passes through host
    memory; "mapped", the part of "leased" that need not be copied; "collectives", gathered from the other ranks.
    """
    group, home = planned.group, planned.placement.parameters
    reads_all = rules.one_sided and home is not Home.DEVICE
    # A group whose home is the device is not leased. On the CPU, a group whose home is host memory is mapped and takes
    # no further memory, so one lease lasts for the whole step. Any other group is leased for each use.
    stays = rules.is_cpu and rules.one_sided and home is Home.HOST
    leases = 0 if home is Home.DEVICE else 1 if stays else uses
    leased = leases * (group.whole_bytes if reads_all else group.partition_bytes)
    # If there are several ranks, they do not map but copy parameters that only pass through the store's memory
    # (training/step/residency.py).
    may_map = rules.is_cpu and reads_all and (home is Home.HOST or not rules.several)
    is_gathered = rules.several and not reads_all
    return {
        "leased": leased,
        "passing": uses * group.partition_bytes if home is Home.NVME else 0,
        "mapped": leased if may_map else 0,
        "collectives": uses * group.whole_bytes if is_gathered else 0,
    }


def _trained(planned: PlannedGroup, uses: int, rules: _Rules) -> dict[str, int]:
    """Return the bytes and elements of one rank that a step moves for the gradient and the update of a group.

    Args:
        uses: the number of modules that compute with the group. The gradient of each module is reduced by itself.
    """
    group, placement = planned.group, planned.placement
    part, whole = group.slot_table.partition_numel, group.slot_table.numel
    gradient = part * group.gradient_dtype.itemsize
    replicated = placement.residence is Residence.REPLICATED
    in_store = placement.optimizer is not Home.DEVICE
    returns = in_store and placement.parameters is Home.DEVICE
    reductions = uses * rules.reductions if rules.several else 0
    # Ranks that keep whole parameters gather the new parameters after the update. Ranks that also keep whole optimizer
    # states gather the gradient before the update, and not the parameters.
    refills = rules.several and placement.residence is not Residence.SHARDED
    refilled = whole * group.gradient_dtype.itemsize if replicated else group.whole_bytes
    return {
        "gradients": gradient,
        # A gradient whose home is the device gets host memory of the store only for its update, so it is never spilled.
        "spilling": gradient if placement.gradients is not Home.DEVICE else 0,
        "collectives": reductions * whole * group.reduction_dtype.itemsize + (refilled if refills else 0),
        "sent": gradient if in_store else 0,
        "returned": group.partition_bytes if returns else 0,
        "reread": group.partition_bytes if returns and placement.optimizer is Home.NVME else 0,
        "updated": part if in_store else 0,
        "states": _state_bytes_read(planned) if placement.optimizer is Home.NVME else 0,
        "on_device": 0 if in_store else whole if replicated else part,
        "put": 0 if in_store else sum(group.dtype_of(kind).itemsize for kind in group.kinds) * part,
    }


def _spilled_gradients(need: StoreNeed, total: Mapping[str, int], config: TrainingConfig, passes: int) -> int:
    """Return the bytes of gradients that a store writes to NVMe in a step, and reads again, for all its ranks.

    Args:
        passes: how often in a step a gradient, or the sum of gradients so far, leaves the rank for the store. On the
            CPU it leaves after each micro-batch whose gradients are reduced. On a GPU, sums stay on the device until
            the last micro-batch, so it leaves once (training/step/gradients.py).
    """
    if need.spilled_gradient_bytes > need.placed_gradient_bytes:
        # Not all gradients whose home is host memory fit into the host budget. The gradients that the store counts at
        # the admission of the job stay in host memory, and no others, because parameters take the rest of the budget.
        spilled = max(0, need.spilled_gradient_bytes - need.gradient_bytes)
        # With early updates that are final, the update frees the gradient before the store writes it to NVMe. So the
        # last backward pass of a step writes no gradients.
        is_freed = config.paramserver.early_updates == "final"
        return spilled * total["spilling"] // max(1, total["gradients"]) * (passes - 1 if is_freed else passes)
    # An early update, in the last backward pass, reads the gradient before the store writes it to NVMe. So the last
    # backward pass writes nothing. If gradients are clipped by their norm, updates begin only at the vote for the step,
    # so gradients are written in each backward pass.
    begins_early = config.paramserver.early_updates and not config.gradient_clipping
    return need.placed_gradient_bytes * (passes - 1 if begins_early else passes)


def _state_bytes_read(planned: PlannedGroup) -> int:
    """Return the bytes of optimizer states and fp32 weights that the update of one rank's part of a group reads."""
    group = planned.group
    has_weight = group.has_master or planned.placement.parameters is Home.DEVICE
    return 4 * (len(group.state_kinds) + int(has_weight)) * group.slot_table.partition_numel


def _is_read_from_nvme(planned: PlannedGroup) -> bool:
    """Return whether the store reads the group's parameters from NVMe whenever they are not in host memory."""
    return planned.placement.residence is Residence.SHARDED and planned.placement.parameters is Home.NVME


def _part(room: int, nbytes: int) -> float:
    """Return the fraction of `nbytes` that fits into `room` bytes of memory; 1 if `nbytes` is 0."""
    return min(1.0, room / nbytes) if nbytes else 1.0


def predict(
    traffic: Traffic, rates: Rates, *, ranks: int, compute_seconds: float, tokens: int, is_cpu: bool
) -> StepTime:
    """Return the bounds of the time of a step.

    Args:
        ranks: the number of ranks of a node.
        compute_seconds: the seconds of forward and backward of all micro-batches of the step on one rank.
        tokens: the tokens of all ranks and micro-batches of the step.
        is_cpu: whether ranks compute on the CPU, so that they copy within host memory the bytes that would cross the
            link of a GPU.
    """
    link = traffic.to_rank + traffic.from_rank
    resources = {
        COMPUTE: compute_seconds,
        COLLECTIVES: traffic.collectives / rates.collective if rates.collective else 0.0,
        NVME: _nvme_seconds(traffic, rates),
        STORE_LINK: (link - traffic.mapped) / rates.copy if is_cpu else link / rates.device_link,
        STORE_UPDATE: traffic.updated / rates.update,
        DEVICE_UPDATE: traffic.updated_on_device / rates.device_update if rates.device_update else 0.0,
    }
    if rates.host_memory:
        through = traffic.nvme_read + traffic.nvme_written + ranks * link + UPDATE_BYTES * traffic.updated
        resources[HOST_MEMORY] = through / rates.host_memory
    return StepTime(resources=resources, tokens=tokens, traffic=traffic)


def _nvme_seconds(traffic: Traffic, rates: Rates) -> float:
    """Return the seconds of all reads and writes of the node's NVMe in a step.

    Reads and writes are assumed to run at the same time until the smaller amount is done. The rest of the larger amount
    then runs alone.
    """
    both = min(traffic.nvme_read, traffic.nvme_written)
    return (
        both / rates.nvme_both
        + (traffic.nvme_read - both) / rates.nvme_read
        + (traffic.nvme_written - both) / rates.nvme_write
    )
