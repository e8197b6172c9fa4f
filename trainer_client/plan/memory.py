"""The memory and disk of a planned job: the bytes that each rank, the store and its tiers hold, and whether they fit.

Each line says whether its figure is exact, because it follows from the layout, or estimated, and why. This module must
never print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paramserver.contract.store_need import FindNeed, StoreNeed
from trainer_client.base.lanes.device_lanes import MOST_COPIES_OUT, SLOTS
from trainer_client.config.home import Home
from trainer_client.config.training_config import TrainingConfig
from trainer_client.plan.device_copies import NO_COPIES, PlannedCopies
from trainer_client.plan.layout import Layout, gathers_one_sided
from trainer_client.plan.machine import Capacities
from trainer_client.plan.rehearsal import GradientRule, Rehearsal
from trainer_client.training.model.placement import Residence
from trainer_client.training.step.gradients import ReductionSchedule
from trainer_client.training.step.recall_depth import MOST_LEAVING, MOST_STAYING

MIB = 1 << 20
# The bytes of host memory that a rank and a daemon take before there is a job. The figures of the daemon are the limits
# that docs/daemon.md states. The figures of a rank are an allowance for Python, torch and transformers.
RANK_BYTES = {"cpu": 480 * MIB, "cuda": 1536 * MIB}
DAEMON_BYTES = {"cpu": 240 * MIB, "cuda": 384 * MIB}
# An allowance for the memory that a rank's libraries take besides RANK_BYTES, once the modules of the model are
# imported: 10 MiB, as with a model of 130,000 parameters (6 MiB in stage 0, 14 MiB in stage 1, mostly gRPC's buffers),
# and 35 MiB that the threads of matrix products keep with larger models. Both were measured on 2 cores with bf16
# instructions.
RANK_ALLOWANCE = 45 * MIB
# gloo makes a copy in each collective: of the input of a reduction, and of the result of a gather. It is not known how
# many of these copies the heap keeps after they are freed. Two copies, one for each thread of gloo, agree best with
# three measured jobs (docs/plan.md).
COLLECTIVE_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table of a rank's memory.

    Attributes:
        what: the name of what takes the bytes, for example "gathered units".
        nbytes: the number of bytes.
        is_exact: whether the number follows from the layout. If false, it is estimated.
        why: how the number was found, for people.
    """

    what: str
    nbytes: int
    is_exact: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A capacity or budget that is too small.

    Attributes:
        what: the name of the capacity in the tables.
        needed, present: the bytes that the job needs, and the bytes of the capacity or budget.
        key: the config key whose value has to be raised; None: the machine is too small.
    """

    what: str
    needed: int
    present: int
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The bytes that a job takes in each memory and on NVMe.

    Attributes:
        rank: the bytes that one rank's device holds at the worst moment of a step; on the CPU, the rank's private
            memory.
        store: the bytes that the store of one node takes.
        host_budget, nvme_budget: the store's budgets.
        boundaries: the bytes of each boundary that a rank moves to the store in a forward, oldest first.
        rank_host_bytes: the bytes of host memory that one rank takes besides those in `rank`.
        device: "cpu" or "cuda".
    """

    rank: tuple[Line, ...]
    store: StoreNeed
    host_budget: int
    nvme_budget: int
    boundaries: Sequence[int]
    rank_host_bytes: int
    device: str

    @property
    def rank_bytes(self) -> int:
        """The bytes that one rank's device holds at the worst moment of a step: the sum of the lines in `rank`."""
        return sum(line.nbytes for line in self.rank)

    @property
    def free_host_budget(self) -> int:
        """Bytes of the host budget that are free for host copies, which the store can evict."""
        return max(0, self.host_budget - self.store.host_bytes - self.store.boundary_host_bytes)

    def node_host_bytes(self, ranks: int) -> int:
        """Return the bytes of host memory that the ranks and the store daemon of a node take."""
        own = self.rank_host_bytes + (self.rank_bytes if self.device == "cpu" else 0)
        return ranks * own + self.host_budget + DAEMON_BYTES[self.device]

    def shortages(self, capacities: Capacities, ranks: int) -> list[Shortage]:
        """Return the capacities and budgets that are too small; empty if the job fits."""
        host = self.node_host_bytes(ranks)
        checks = [
            Shortage(
                what="host budget of the store",
                needed=self.store.least_host_budget,
                present=self.host_budget,
                key="paramserver.host_budget",
            ),
            Shortage(
                what="NVMe budget of the store",
                needed=self.store.nvme_bytes,
                present=self.nvme_budget,
                key="paramserver.nvme_budget",
            ),
            Shortage(what="host memory of the node", needed=host, present=capacities.host),
            Shortage(what="NVMe of the node", needed=self.store.nvme_bytes, present=capacities.nvme),
        ]
        if self.device != "cpu":
            checks.insert(0, Shortage(what="memory of a device", needed=self.rank_bytes, present=capacities.device))
        return [check for check in checks if check.needed > check.present]


def plan_memory(
    device: str,
    layout: Layout,
    config: TrainingConfig,
    rehearsal: Rehearsal,
    find_need: FindNeed,
    copies: PlannedCopies = NO_COPIES,
    micro_batches: int = 1,
) -> MemoryPlan:
    """Return the bytes that a job takes if its ranks compute on `device` ("cpu" or "cuda").

    A step of the job has `micro_batches` micro-batches.
    """
    kept = _kept_gradients(layout, config)
    rule = gradient_rule(layout, config, kept if device == "cpu" else {}, device=device, micro_batches=micro_batches)
    lines = [
        *_lines_of_states(layout, copies),
        *_lines_of_gradients(layout, rule, rehearsal, device=device, micro_batches=micro_batches),
        *_lines_of_units(layout, config, rehearsal, is_cpu=device == "cpu"),
        Line(
            what="buffers of libraries",
            nbytes=RANK_ALLOWANCE,
            is_exact=False,
            why="gRPC and matrix products: an allowance",
        ),
    ]
    budget = int(config.paramserver.host_budget)
    return MemoryPlan(
        rank=tuple(line for line in lines if line.nbytes),
        store=layout.store_need(find_need, budget, rehearsal.boundaries),
        host_budget=budget,
        nvme_budget=int(config.paramserver.nvme_budget),
        boundaries=rehearsal.boundaries,
        rank_host_bytes=RANK_BYTES[device] + (0 if device == "cpu" else sum(kept.values())),
        device=device,
    )


def _lines_of_states(layout: Layout, copies: PlannedCopies) -> list[Line]:
    """Return the lines of a rank's memory table for states and copies that stay during a step, and for updates."""
    homes = layout.rank_bytes()
    on_device = Home.DEVICE.value
    return [
        _exact("parameters", homes["parameters"].get(on_device, 0), "their home is the device"),
        _exact("optimizer states", homes["optimizer"].get(on_device, 0), "their home is the device"),
        _exact("buffers of the model", layout.buffer_bytes, "they are on the device of each rank"),
        _exact("copies of parameters", copies.nbytes, "paramserver.gpu_budget, or all parameters that a rank reads"),
        _exact(
            "update on the device",
            _update_bytes(layout),
            "the fp32 gradient of the largest group, whole where states are replicated, and new parameters on their "
            "way to the store",
        ),
    ]


def _lines_of_gradients(
    layout: Layout, rule: GradientRule, rehearsal: Rehearsal, *, device: str, micro_batches: int
) -> list[Line]:
    """Return the lines of a rank's memory table for activations, boundaries of checkpoints, and gradients."""
    is_cpu = device == "cpu"
    # From the second micro-batch on, the gradient sums of all groups are on the device from the start of the forward.
    # So the plan counts these sums apart, and not in the peak of the rehearsed pass.
    sums = _staying(rule) if micro_batches > 1 else 0
    return [
        Line(
            what="activations and gradients",
            nbytes=rehearsal.peak_bytes(_without_staying(rule) if sums else rule, in_heap=is_cpu),
            is_exact=False,
            why="the most bytes of live tensors in a step that is run without values"
            + ("; with kept gradients, and holes in malloc's heap" if is_cpu else "")
            + (f"; of the boundaries that move, the newest {MOST_STAYING} stay" if rehearsal.boundaries else ""),
        ),
        _exact(
            "gradients between micro-batches",
            sums,
            "sums that stay on the device until the last micro-batch of the step",
        ),
        Line(
            what="boundaries on their way",
            nbytes=0 if is_cpu else (MOST_LEAVING + 1) * max(rehearsal.boundaries, default=0),
            is_exact=False,
            why=f"{MOST_LEAVING} that leave for the store, and the memory for one that is back before it is needed",
        ),
        Line(
            what="gradients on their way",
            nbytes=0 if is_cpu or sums else _leaving_gradients(layout),
            is_exact=False,
            why=f"the {MOST_COPIES_OUT} largest groups' parts: at most so many leave for the store at a time",
        ),
    ]


def _lines_of_units(layout: Layout, config: TrainingConfig, rehearsal: Rehearsal, *, is_cpu: bool) -> list[Line]:
    """Return the lines of a rank's memory table for gathered units, staging slots and collectives."""
    one_sided = gathers_one_sided(layout, config, is_cpu=is_cpu)
    gathered, gathered_why = _gathered(
        layout,
        maps=is_cpu and one_sided,
        reruns=rehearsal.again_boundary_bytes > 0,
        most_elements=config.zero_optimization.stage3_max_live_parameters or 0,
    )
    return [
        _exact("gathered units", gathered, gathered_why),
        Line(
            what="staging slots",
            nbytes=0 if is_cpu else SLOTS * _largest_in_a_slot(layout, one_sided=one_sided),
            is_exact=False,
            why=f"at most {SLOTS} of the largest group that is copied from the store, or gathered",
        ),
        Line(
            what="collectives",
            nbytes=_collective_buffers(layout, one_sided=one_sided, is_cpu=is_cpu),
            is_exact=False,
            why="the largest gradient in the dtype of its reduction"
            + (", and what the threads of gloo keep of the largest group" if is_cpu else ""),
        ),
    ]


def _staying(rule: GradientRule) -> int:
    """Return the bytes of the sums of gradients that stay on the device between two micro-batches of a step."""
    whole = 0 if rule.is_reduced_at_once else sum(rule.full_bytes.values())
    return sum(rule.partition_bytes.values()) + whole


def _without_staying(rule: GradientRule) -> GradientRule:
    """Return the rule without the sums of gradients that stay on the device between two micro-batches.

    These sums are counted in a line of their own, so the peak of a rehearsed micro-batch is computed without them.
    """
    none = dict.fromkeys(rule.full_bytes, 0)
    return replace(rule, partition_bytes=none, full_bytes=rule.full_bytes if rule.is_reduced_at_once else none)


def gradient_rule(
    layout: Layout, config: TrainingConfig, kept: Mapping[str, int], *, device: str, micro_batches: int
) -> GradientRule:
    """Return the rule that gives the bytes of gradients on a rank's device during backward.

    The rule follows training/step/gradients.py. On a GPU, a gradient whose home is the store is summed up on the
    device. The gradient leaves the device when it is complete, which with several micro-batches is in the last one.
    """
    several = layout.world.size > 1
    # In a step with one backward pass, each unit's gradients are reduced and freed before the pass goes on, with either
    # ReductionSchedule. On the CPU this saves little memory, because glibc's heap keeps what is freed. So on the CPU,
    # with ReductionSchedule.BOUNDARY, the plan counts the whole gradients of all units, as at stage 1. Two jobs of two
    # ranks were measured: a rank took 469 MiB at stage 1, for which the plan had 466, and 455 MiB at stage 2, for which
    # a plan without these gradients had only 394.
    frees_in_only_pass = micro_batches == 1 and device != "cpu"
    at_once = ReductionSchedule.of(config) is ReductionSchedule.MICRO_BATCH or not several or frees_in_only_pass
    group_of: dict[str, str] = {}
    full: Counter[str] = Counter()
    partition: Counter[str] = Counter()
    staged: Counter[str] = Counter()
    for planned in layout.groups:
        group = planned.group
        if not group.trainable:
            continue
        # The rehearsal does not divide parameters into tiles. So the gradient of a whole parameter is counted for the
        # group of its first tile, and the parts of all its tiles are added up there.
        for parameter in group.parameters:
            group_of.setdefault(parameter.fqn, group.name)
        name = group_of[group.parameters[0].fqn]
        whole = group.slot_table.numel * group.gradient_dtype.itemsize if several else 0
        full[name] = max(full[name], whole) if at_once else full[name] + whole
        part = group.slot_table.partition_numel * group.gradient_dtype.itemsize
        if planned.placement.gradients is Home.DEVICE:
            partition[name] += part
        elif device != "cpu" and at_once:
            (staged if micro_batches == 1 else partition)[name] += part
    return GradientRule(
        group_of=group_of,
        full_bytes={name: nbytes + staged[name] for name, nbytes in full.items()},
        partition_bytes=partition,
        kept_bytes=kept,
        is_reduced_at_once=at_once,
    )


def _kept_gradients(layout: Layout, config: TrainingConfig) -> dict[str, int]:
    """Return, by group, the bytes of the copies of gradients that the client's journal keeps.

    client/transport/journal.py keeps them for a daemon that is restarted.
    """
    section = config.paramserver
    copies = {
        planned.group.name: planned.group.slot_table.partition_numel * planned.group.gradient_dtype.itemsize
        for planned in layout.groups
        if planned.group.trainable and planned.placement.optimizer is not Home.DEVICE
    }
    fits = sum(copies.values()) <= int(section.kept_gradients)
    return copies if section.reattach_timeout_seconds and section.durable_every and fits else {}


def _gathered(layout: Layout, *, maps: bool, reruns: bool, most_elements: int) -> tuple[int, str]:
    """Return the bytes of the units that are gathered at once, and a text that says why.

    Args:
        maps: whether ranks map parameters in their store's memory, so that they take no memory of their own.
        reruns: whether a unit's forward runs again, to compute a boundary, while the next unit is gathered for its
            backward.
        most_elements: the most elements that may stay gathered although no forward or backward needs them.
    """
    if layout.residence is not Residence.SHARDED:
        return 0, ""
    root, *others = layout.units
    alone = layout.world.size == 1
    if maps and all(
        planned.placement.parameters is Home.HOST or (alone and planned.placement.parameters is Home.NVME)
        for planned in layout.groups
    ):
        return 0, "the store's own bytes are mapped"
    largest = max((unit.whole_bytes for unit in others), default=0)
    at_once = root.whole_bytes + (2 if reruns else 1) * largest
    whole = sum(unit.whole_bytes for unit in layout.units)
    kept = int(whole * min(1.0, most_elements / max(1, sum(p.group.slot_table.numel for p in layout.groups))))
    if kept > at_once:
        return kept, "those that zero_optimization.stage3_max_live_parameters lets stay"
    if reruns:
        return at_once, "the root and twice the largest unit, of which one computes a boundary"
    return at_once, "the root and the largest unit"


def _largest_in_a_slot(layout: Layout, *, one_sided: bool) -> int:
    """Return the most bytes that pass through a staging slot of an accelerator at once.

    base/lanes/device_lanes.py implements the slots.
    """
    alone = layout.world.size == 1
    passing = [
        planned.group.partition_bytes if one_sided else planned.group.whole_bytes
        for planned in layout.groups
        if planned.placement.residence is Residence.SHARDED
        and not (alone and planned.placement.parameters is Home.DEVICE)
    ]
    return max(passing, default=0)


def _leaving_gradients(layout: Layout) -> int:
    """Return the bytes of gradients that an accelerator holds at most while they are copied to the store."""
    leaving = sorted(
        planned.group.slot_table.partition_numel * planned.group.gradient_dtype.itemsize
        for planned in layout.groups
        if planned.group.trainable and planned.placement.gradients is not Home.DEVICE
    )
    return sum(leaving[-MOST_COPIES_OUT:])


def _collective_buffers(layout: Layout, *, one_sided: bool, is_cpu: bool) -> int:
    """Return the bytes that collectives take: a copy of the largest gradient that is reduced in another dtype.

    On the CPU, the copies that gloo's threads keep are added: of the largest reduction, and of the largest gather
    unless the parameters are gathered `one_sided`.
    """
    if layout.world.size == 1:
        return 0
    trained = [planned.group for planned in layout.groups if planned.group.trainable]
    reduced = {group.name: group.slot_table.numel * group.reduction_dtype.itemsize for group in trained}
    cast = max((reduced[g.name] for g in trained if g.reduction_dtype is not g.gradient_dtype), default=0)
    if not is_cpu:
        return cast
    whole = (
        0
        if one_sided and layout.residence is Residence.SHARDED
        else max(planned.group.whole_bytes for planned in layout.groups)
    )
    return cast + COLLECTIVE_COPIES * (max(reduced.values(), default=0) + whole)


def _update_bytes(layout: Layout) -> int:
    """Return the bytes that updates on the device take besides the states (see training/step/updates.py).

    The largest update takes an fp32 copy of its gradient, if the gradient has another dtype. If the states are
    replicated, it also takes the whole gradient, which is gathered from all ranks. Added to this are all new parameters
    whose home is the store, because they stay on the device until the parameters of all groups are handed over.
    """
    most = new = 0
    for planned in layout.groups:
        group, placement = planned.group, planned.placement
        if not group.trainable or placement.optimizer is not Home.DEVICE:
            continue
        replicated = placement.residence is Residence.REPLICATED
        numel = group.slot_table.numel if replicated else group.slot_table.partition_numel
        wide = 0 if group.gradient_dtype.itemsize == 4 else 4 * numel
        most = max(most, wide + (numel * group.gradient_dtype.itemsize if replicated else 0))
        new += group.partition_bytes if placement.parameters is not Home.DEVICE else 0
    return most + new


def _exact(what: str, nbytes: int, why: str) -> Line:
    return Line(what=what, nbytes=nbytes, is_exact=True, why=why)
