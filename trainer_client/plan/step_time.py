"""The time of a planned step: the bytes that it moves on each link, and the seconds of each resource.

The links and resources have the names of the step report, so that a plan and a measured step can be compared. This
module must never measure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from paramserver.contract.store_need import StoreNeed
from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.model.placement import Residence
from trainer_client.model.states import is_in_store
from trainer_client.plan.device_copies import NO_COPIES, PlannedCopies, reads_of_pass
from trainer_client.plan.layout import Layout, PlannedGroup, gathers_one_sided
from trainer_client.plan.machine import Rates, StepOverhead
from trainer_client.plan.memory import MemoryPlan
from trainer_client.plan.nodes import UPDATE_BYTES, UPDATE_BYTES_IN_MEMORY
from trainer_client.recorder import Link
from trainer_client.report.step_report import COMPUTE, NVME_READ, NVME_WRITTEN
from trainer_client.step.gradients import ReductionSchedule

STORE_LINK = "store_link"
COLLECTIVES = Link.COLLECTIVES.value
STORE_PROCESSOR = "store_processor"
TRAINER_COPIES = "trainer_copies"
DEVICE_UPDATE = "device_update"
HAND_OVER = "hand_over"
LIBRARY = "library"
HOST_MEMORY = "host_memory"
# The daemon's CPU seconds for each byte that it reads or writes, which checksums and system calls take.
# benchmarks/RESULTS.md ("NVMe tier and engine") has 0.13 to 0.17 s/GB in requests of 1 to 4 MiB, 0.082 to 0.085 of
# them for checksums.
STORE_SECONDS_PER_BYTE = 0.15e-9
_CHECKING_SECONDS_PER_BYTE = 0.085e-9
# The number of reading and writing threads of a data file.
_IO_THREADS = 6
# An update that begins before its step is voted for takes longer by this factor, because its result goes beside the
# committed bytes. It was measured on the machines of an H100 and an H200 (docs/gpus.md).
ASIDE_FACTOR = 1 / 0.55
# The rate at which the kernel handles the page faults of mapped parameters: 3 ms for 25 MB, measured as
# model/flat_memory.py says.
MAPPED_BYTES_PER_SECOND = 25e6 / 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that a step moves.

    Attributes:
        to_rank, from_rank: the bytes that one rank gets from its store, and sends to it.
        collectives: the bytes of whole buffers that one rank gathers or reduces.
        collective_calls: the number of these buffers.
        nvme_read, nvme_written: the bytes that the node's NVMe reads and writes.
        updated: the elements that the node's store updates; `updated_on_device`: those that one rank's device updates.
        updated_in_memory: those of the store's whose states are all in host memory, and are written nowhere else.
        updated_aside: those of them whose update begins before the step is voted for, with its result beside the
            committed bytes.
        put: the bytes of states on one rank's device that the rank hands to the store, which writes them before it
            answers.
        gradients: the bytes of one rank's part of the gradients.
        sums: how often a step adds to that part.
        mapped: the bytes of parameters that one rank maps from its store's memory.
        copied: the bytes of parameters that one rank copies out of its store's memory, because it must not map them.
        returned: the bytes of parameters at home on one rank's device that the store has updated, and that go back.
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
    collective_calls: int
    nvme_read: int
    nvme_written: int
    updated: int
    updated_on_device: int
    updated_in_memory: int
    updated_aside: int
    put: int
    gradients: int
    sums: int
    mapped: int
    copied: int
    returned: int
    boundaries: int
    spilled_boundaries: int
    hit: float
    device_hit: float
    states_hit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The predicted time of a step.

    Attributes:
        seconds: the duration of the step.
        resources: the least seconds that each resource needs.
        binding: the resource that needs the most seconds.
        tokens: the tokens of one step on all ranks.
        hiding_tokens: the least tokens of a step with which the times of NVMe and links are hidden behind compute;
            None: nothing is moved.
        traffic: the bytes that the step moves.
        store_cpu_seconds: the CPU seconds of all threads of one node's store.
        store_threads: the least number of optimizer threads with which the store's updates bind no step; 0 if they do
            with any number, because host memory bounds them, or if nothing else takes time.
    """

    seconds: float
    resources: Mapping[str, float]
    binding: str
    tokens: int
    hiding_tokens: int | None
    traffic: Traffic
    store_cpu_seconds: float
    store_threads: int

    @property
    def roofline_fraction(self) -> float:
        """The time of the binding resource divided by that of the step."""
        return self.resources[self.binding] / self.seconds if self.seconds else 0.0


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
    # Else only those steps are committed that the durability class asks for (run/commits.py).
    every = config.paramserver.durable_every
    in_store = any(is_in_store(planned) for planned in layout.groups)
    put = int(total["put"] * (1.0 if in_store else 1.0 / every if every else 0.0))
    written = need.updated_bytes + (need.volatile_bytes // every if every else 0) if in_store else put * ranks
    in_memory, early = (0 if every == 1 else total[name] * ranks for name in ("in_memory", "early"))
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
        collective_calls=total["calls"],
        nvme_read=int(states * (1.0 - states_hit)) + fetched + spilled,
        nvme_written=spilled + written,
        updated=total["updated"] * ranks,
        updated_on_device=total["on_device"],
        updated_in_memory=in_memory,
        updated_aside=int(early * _aside(memory.store, config)),
        put=put,
        gradients=total["gradients"],
        sums=sums,
        mapped=total["mapped"],
        copied=total["copied"],
        returned=total["returned"],
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
    # Several ranks copy parameters that only pass through the store's memory (step/residency.py).
    may_map = rules.is_cpu and reads_all and (home is Home.HOST or not rules.several)
    gathers = uses if rules.several and not reads_all else 0
    return {
        "leased": leased,
        "passing": uses * group.partition_bytes if home is Home.NVME else 0,
        "mapped": leased if may_map else 0,
        "copied": leased if rules.is_cpu and not may_map else 0,
        "collectives": gathers * group.whole_bytes,
        "calls": gathers,
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
    # Parameters at home on the device are kept with their states.
    in_memory = part if Home.NVME not in (placement.parameters, placement.optimizer) and in_store else 0
    return {
        "gradients": gradient,
        # A gradient at home on the device gets memory of the store only for its update.
        "spilling": gradient if placement.gradients is not Home.DEVICE else 0,
        "collectives": reductions * whole * group.reduction_dtype.itemsize + (refilled if refills else 0),
        "calls": reductions + int(refills),
        "sent": gradient if in_store else 0,
        "returned": group.partition_bytes if returns else 0,
        "reread": group.partition_bytes if returns and placement.optimizer is Home.NVME else 0,
        "updated": part if in_store else 0,
        "in_memory": in_memory,
        # A gradient at home on the device comes to the store only when the step is made.
        "early": in_memory if placement.gradients is not Home.DEVICE else 0,
        "states": _state_bytes_read(planned) if placement.optimizer is Home.NVME else 0,
        "on_device": 0 if in_store else whole if replicated else part,
        "put": 0 if in_store else sum(group.dtype_of(kind).itemsize for kind in group.kinds) * part,
    }


def _spilled_gradients(need: StoreNeed, total: Mapping[str, int], config: TrainingConfig, passes: int) -> int:
    """Return the bytes of gradients that the ranks of a store write to NVMe in a step, and read from it.

    Args:
        passes: how often a complete gradient or a sum leaves the rank. On the CPU it does after each micro-batch that
            is reduced, for the next one or for the update; on a GPU, sums stay there until the last micro-batch
            (step/gradients.py).
    """
    if need.spilled_gradient_bytes > need.placed_gradient_bytes:
        # Those placed in host memory do not fit. No more of them stay there than the admission counts, because
        # parameters take the rest.
        spilled = max(0, need.spilled_gradient_bytes - need.gradient_bytes)
        # A final update frees the gradient before it would be written.
        is_freed = config.paramserver.early_updates == "final"
        return spilled * total["spilling"] // max(1, total["gradients"]) * (passes - 1 if is_freed else passes)
    # An update that begins in the last backward pass reads the gradient before it would be written.
    return need.placed_gradient_bytes * (passes - 1 if _begin_early(config) else passes)


def _begin_early(config: TrainingConfig) -> bool:
    """Return whether updates begin before their step is voted for: not if gradients are clipped by their norm."""
    return config.paramserver.early_updates and not config.gradient_clipping


def _aside(need: StoreNeed, config: TrainingConfig) -> float:
    """Return the fraction of the updates in host memory that begin before their step is voted for.

    Only those do for whose results the host budget has room.
    """
    return _part(need.spare_bytes, need.volatile_bytes) if _begin_early(config) else 0.0


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
    layout: Layout,
    traffic: Traffic,
    rates: Rates,
    *,
    compute_seconds: float,
    overhead: StepOverhead,
    tokens: int,
    is_cpu: bool,
    store_has_cores: bool,
    optimizer_threads: int,
    devices: int = 1,
) -> StepTime:
    """Return the time of a step.

    On a GPU all resources work at the same time. On the CPU the ranks copy and communicate themselves, one after the
    other with their computation and the library's code. If the ranks use all processors, the work of the store delays
    them; see `delay_by_store`. On the CPU, a rank that hands states of its own memory to the store waits until they are
    written.

    Args:
        compute_seconds: the seconds of forward and backward of all micro-batches of the step on one rank.
        overhead: the time of the library's code in the whole step.
        tokens: the tokens of all ranks and micro-batches of the step.
        store_has_cores: whether the store has processors of its own, so that its threads work at the same time.
        optimizer_threads: the daemon's key of this name.
        devices: the number of the daemon's data files, each on a device and with threads of its own.
    """
    ranks = layout.world.ranks
    # A gradient is copied or added in each sum, and at last checked for infinities and read once more for its norm.
    passes = (traffic.sums + 2) * traffic.gradients + traffic.put + traffic.returned + traffic.boundaries
    link = (traffic.to_rank + traffic.from_rank) / (rates.copy if is_cpu else rates.device_link)
    moved = traffic.nvme_read + traffic.nvme_written
    # Updates that begin before the vote count as more elements. The time that the threads compute is divided among
    # them, and the time that host memory needs is not. The measured time is nearer to the sum of both than to the
    # larger of them.
    longer = traffic.updated_aside * (ASIDE_FACTOR - 1.0)
    limit = rates.update_limit or (rates.host_memory / UPDATE_BYTES_IN_MEMORY if rates.host_memory else math.inf)
    waiting = (traffic.updated_in_memory + longer) / limit
    updating, checking = (traffic.updated + longer) / rates.update, moved * _CHECKING_SECONDS_PER_BYTE
    serving = moved * (STORE_SECONDS_PER_BYTE - _CHECKING_SECONDS_PER_BYTE)
    # The thread that runs the optimizer also checks the bytes that updates read and write.
    optimizer = updating + (checking if traffic.updated else 0.0)
    other = serving + (0.0 if traffic.updated else checking) + overhead.store
    # A thread that waits for memory takes its processor, too.
    busy = optimizer + waiting * optimizer_threads
    resources = {
        COMPUTE: compute_seconds,
        LIBRARY: overhead.rank,
        COLLECTIVES: _collective_seconds(traffic, rates),
        NVME_READ: traffic.nvme_read / rates.nvme_read,
        NVME_WRITTEN: traffic.nvme_written / rates.nvme_write,
        "nvme": _nvme_seconds(traffic, rates),
        STORE_PROCESSOR: max(optimizer / optimizer_threads + waiting, other / (_IO_THREADS * devices)),
        DEVICE_UPDATE: traffic.updated_on_device / rates.device_update if rates.device_update else 0.0,
        HAND_OVER: traffic.put * ranks / rates.nvme_write,
    }
    if is_cpu:
        # A unit that is copied gets fresh pages each time, because its memory was given back after its last use, and so
        # does a boundary that comes back.
        copying = passes / rates.copy + (traffic.copied + traffic.boundaries) / rates.fresh_copy
        resources[TRAINER_COPIES] = copying + traffic.mapped / MAPPED_BYTES_PER_SECOND
    else:
        resources[STORE_LINK] = link
    if rates.host_memory:
        through = moved + ranks * (traffic.to_rank + traffic.from_rank) + UPDATE_BYTES * traffic.updated
        through += (UPDATE_BYTES_IN_MEMORY - UPDATE_BYTES) * traffic.updated_in_memory
        resources[HOST_MEMORY] = through / rates.host_memory
    own = [COMPUTE, LIBRARY, COLLECTIVES, DEVICE_UPDATE, HAND_OVER, *([TRAINER_COPIES] if is_cpu else [])]
    serial = sum(resources[name] for name in own) if is_cpu else 0.0
    if is_cpu and not store_has_cores:
        resources[STORE_PROCESSOR] = delay_by_store(serial, busy, other)
        serial += resources[STORE_PROCESSOR]
    seconds = max(serial, *resources.values())
    hidden = max(resources[name] for name in ("nvme", STORE_LINK, STORE_PROCESSOR, HOST_MEMORY) if name in resources)
    others = max(time for name, time in resources.items() if name != STORE_PROCESSOR)
    return StepTime(
        seconds=seconds,
        resources=resources,
        binding=max(resources, key=lambda name: resources[name]),
        tokens=tokens,
        hiding_tokens=int(tokens * hidden / compute_seconds) if hidden and compute_seconds else None,
        traffic=traffic,
        store_cpu_seconds=busy + other,
        store_threads=math.ceil(optimizer / (others - waiting)) if others > waiting else 0,
    )


def _collective_seconds(traffic: Traffic, rates: Rates) -> float:
    """Return the seconds of all collectives, which follow each other."""
    if not rates.collective:
        return 0.0
    return traffic.collectives / rates.collective + traffic.collective_calls * rates.collective_latency


def delay_by_store(own: float, optimizer: float, other: float) -> float:
    """Return the seconds by which the store's threads delay ranks that compute on all processors.

    A rank waits at the end of each operation for the slowest of its threads. So a thread of the store delays the whole
    rank by as much CPU time as it takes on one processor. While two of its threads work, on two processors, the rank is
    not slower than beside one. The optimizer's thread and those of I/O work at moments that are independent of each
    other. Beside a rank each of them needs twice its CPU time, so in a step of T seconds both work for
    (2 optimizer / T) (2 other / T) T seconds, of which half is CPU time: 2 optimizer other / T of the delay is saved.
    With T = own + delay this is a quadratic equation.

    Args:
        own: the seconds of a step without the store's work.
        optimizer: the CPU seconds of the thread that runs the optimizer.
        other: those of all other threads of the store.
    """
    whole = own + optimizer + other
    step = (whole + math.sqrt(max(0.0, whole**2 - 8 * optimizer * other))) / 2
    return max(step - own, optimizer, other)


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
