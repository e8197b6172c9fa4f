"""The time of a planned step: the bytes that it moves on each link, and two bounds of its seconds.

This module must never measure.

[Note: the bounds] For each resource (compute, and each link, disk or processor that moves or updates bytes), the plan
has the least seconds that it needs for the step: its work / its rate. If everything overlaps, the step takes as long as
the longest of them; if nothing does, as long as all of them together. Neither bound has what is not in the rates: the
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
    """The bytes that a step moves.

    Attributes:
        to_rank, from_rank: the bytes that one rank gets from its store, and sends to it.
        collectives: the bytes of whole buffers that one rank gathers or reduces.
        nvme_read, nvme_written: the bytes that the node's NVMe reads and writes.
        updated: the elements that the node's store updates; `updated_on_device`: those that one rank's device updates.
        put: the bytes of states on one rank's device that the rank hands to the store, on average over the steps.
        mapped: the bytes of parameters that one rank maps from its store's memory, and does not copy.
        boundaries: the bytes of boundaries of activation checkpoints that one rank sends to its store, and gets back.
        spilled_boundaries: the bytes of boundaries that the node's NVMe writes, and reads again.
        hit: the fraction of the parameters that pass through host memory (those whose home is NVMe, and those at home
            on a device with states on NVMe) that is expected to stay there between two uses.
        device_hit: the fraction of the bytes of parameters that a rank reads which it finds on its device.
        states_hit: the fraction of the optimizer states on NVMe that is expected to stay in host memory from update to
            update.
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
        """The resource that needs the most seconds."""
        return max(self.resources, key=lambda name: self.resources[name])

    @property
    def overlapped_seconds(self) -> float:
        """The duration of the step if everything overlaps."""
        return self.resources[self.binding]

    @property
    def serial_seconds(self) -> float:
        """The duration of the step if nothing overlaps."""
        return sum(self.resources.values())

    @property
    def hiding_tokens(self) -> int | None:
        """The least tokens of a step from which on compute takes longer than NVMe, link, host memory and the store.

        None if none of them has anything to do, or compute takes no time.
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
        copies: the copies of parameters on a rank's device, whose reads move nothing.
    """
    ranks = layout.world.ranks
    rules = _Rules(
        several=layout.world.size > 1,
        is_cpu=is_cpu,
        one_sided=gathers_one_sided(layout, config, is_cpu=is_cpu),
        reductions=micro_batches if ReductionSchedule.of(config) is ReductionSchedule.MICRO_BATCH else 1,
    )
    need = memory.store
    # A unit is gathered whole: its frozen groups come again in the backward pass beside those that are trained.
    reads = Counter(unit.fqn for unit in reads_of_pass(layout.units))
    total: Counter[str] = Counter()
    for unit in layout.units:
        for planned in unit.groups:
            if planned.placement.residence is Residence.SHARDED:
                total.update(_gathered(planned, micro_batches * reads[unit.fqn], rules))
            if planned.group.trainable:
                total.update(_trained(planned, unit.uses, rules))
    # If any update changes bytes in the store, each step is committed, with the states that are newer on the device.
    # Else only those steps are committed that the durability class asks for (training/run/commits.py).
    every = config.paramserver.durable_every
    in_store = any(is_in_store(planned) for planned in layout.groups)
    put = int(total["put"] * (1.0 if in_store else 1.0 / every if every else 0.0))
    written = need.updated_bytes + (need.volatile_bytes // every if every else 0) if in_store else put * ranks
    boundaries = sum(memory.boundaries) * micro_batches
    # Parameters at home on the device pass through host memory only if the store updates them, once in a step. They are
    # kept with their states, so those with states in host memory are there already.
    through = ranks * (total["reread"] + sum(p.group.partition_bytes for p in layout.groups if _is_read_from_nvme(p)))
    hit = _part(memory.free_host_budget, through)
    fetched = int(ranks * (total["passing"] * (1.0 - copies.hit) + total["reread"]) * (1.0 - hit))
    # An update makes a host copy of each state for which the host budget has room, and the next update works on that
    # copy. All room that nothing else takes holds such copies. The store evicts them before it evicts parameters,
    # because the next use of parameters is known.
    states = total["states"] * ranks
    states_hit = _part(max(0, memory.free_host_budget - through), states)
    # Boundaries that do not fit are written in each forward, and read in its backward pass.
    spilled_boundaries = need.spilled_boundary_bytes * micro_batches
    # Several ranks that reduce in the last micro-batch only have nothing for the store before that.
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
    """The rules by which all groups of a job move.

    Attributes:
        several: whether the job has several ranks.
        is_cpu: whether ranks compute on the CPU.
        one_sided: whether ranks read the partitions of all ranks in their store's memory.
        reductions: how often a step reduces each gradient over the ranks.
    """

    several: bool
    is_cpu: bool
    one_sided: bool
    reductions: int


def _gathered(planned: PlannedGroup, uses: int, rules: _Rules) -> dict[str, int]:
    """Return the bytes that the parameters of a sharded group move in a step with this number of uses, for one rank."""
    group, home = planned.group, planned.placement.parameters
    reads_all = rules.one_sided and home is not Home.DEVICE
    # On the device a group is not leased. On the CPU, one in host memory is mapped without taking further memory, so
    # its lease lasts until the step ends.
    stays = rules.is_cpu and rules.one_sided and home is Home.HOST
    leases = 0 if home is Home.DEVICE else 1 if stays else uses
    leased = leases * (group.whole_bytes if reads_all else group.partition_bytes)
    # Several ranks copy parameters that only pass through the store's memory (training/step/residency.py).
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
        uses: the number of modules that compute with the group, each of which has its gradient reduced.
    """
    group, placement = planned.group, planned.placement
    part, whole = group.slot_table.partition_numel, group.slot_table.numel
    gradient = part * group.gradient_dtype.itemsize
    replicated = placement.residence is Residence.REPLICATED
    in_store = placement.optimizer is not Home.DEVICE
    returns = in_store and placement.parameters is Home.DEVICE
    reductions = uses * rules.reductions if rules.several else 0
    # Ranks that keep the whole parameters gather them after the update. Where they keep the whole states, too, they
    # gather the gradient before it instead.
    refills = rules.several and placement.residence is not Residence.SHARDED
    refilled = whole * group.gradient_dtype.itemsize if replicated else group.whole_bytes
    return {
        "gradients": gradient,
        # A gradient at home on the device gets memory of the store only for its update.
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
    """Return the bytes of gradients that the ranks of a store write to NVMe in a step, and read from it.

    Args:
        passes: how often a complete gradient or a sum leaves the rank. On the CPU it does after each micro-batch that
            is reduced, for the next one or for the update; on a GPU, sums stay there until the last micro-batch
            (training/step/gradients.py).
    """
    if need.spilled_gradient_bytes > need.placed_gradient_bytes:
        # Those placed in host memory do not fit. No more of them stay there than the admission counts, because
        # parameters take the rest.
        spilled = max(0, need.spilled_gradient_bytes - need.gradient_bytes)
        # A final update frees the gradient before it would be written.
        is_freed = config.paramserver.early_updates == "final"
        return spilled * total["spilling"] // max(1, total["gradients"]) * (passes - 1 if is_freed else passes)
    # An update that begins in the last backward pass reads the gradient before it would be written. It begins only when
    # the step is voted for if gradients are clipped by their norm.
    begins_early = config.paramserver.early_updates and not config.gradient_clipping
    return need.placed_gradient_bytes * (passes - 1 if begins_early else passes)


def _state_bytes_read(planned: PlannedGroup) -> int:
    """Return the bytes of one rank's optimizer states and master weights that an update reads."""
    group = planned.group
    has_weight = group.has_master or planned.placement.parameters is Home.DEVICE
    return 4 * (len(group.state_kinds) + int(has_weight)) * group.slot_table.partition_numel


def _is_read_from_nvme(planned: PlannedGroup) -> bool:
    """Return whether the store reads the group's parameters from NVMe whenever they are not in host memory."""
    return planned.placement.residence is Residence.SHARDED and planned.placement.parameters is Home.NVME


def _part(room: int, nbytes: int) -> float:
    """Return the fraction of the bytes for which there is room; 1 if there are no bytes."""
    return min(1.0, room / nbytes) if nbytes else 1.0


def predict(
    traffic: Traffic, rates: Rates, *, ranks: int, compute_seconds: float, tokens: int, is_cpu: bool
) -> StepTime:
    """Return the bounds of the time of a step.

    Args:
        ranks: the ranks of a node.
        compute_seconds: the seconds of forward and backward of all micro-batches of the step on one rank.
        tokens: the tokens of all ranks and micro-batches of the step.
        is_cpu: whether ranks compute on the CPU, so that they copy in host memory what a GPU's link would move.
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
    """Return the seconds of all reads and writes.

    Reads and writes run at once until the smaller amount is done; then the rest of the larger one runs alone.
    """
    both = min(traffic.nvme_read, traffic.nvme_written)
    return (
        both / rates.nvme_both
        + (traffic.nvme_read - both) / rates.nvme_read
        + (traffic.nvme_written - both) / rates.nvme_write
    )
