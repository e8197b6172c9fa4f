"""Engines on real disks, small jobs, and the same training in plain torch as the reference.

The reference is torch.optim.AdamW on whole parameters; it knows nothing of shards, tiles, tiers or versions.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # Otherwise the first optimizer imports it, which blocks the event loop for seconds.

from paramserver.contract.optimizers.optimizer import HyperParameters
from paramserver.optimizer_kernel import OptimizerUpdate
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base import syscalls
from storage.base.codec import PLAIN, AbsentCodec, codecs_named
from storage.base.config import EngineConfig
from storage.base.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.engine import Engine
from storage.jobs.accounts import Holder
from storage.memory.parkable import Gradient
from storage.state.slab import NEVER
from storage.state.versions import Job
from storage.steps.tile import Kernel, UpdateTile
from storage.tiers.base import PAGE_BYTES, round_up
from storage.tiers.contract import BackingTier, CopyTier, Region
from storage.tiers.extents import unused_runs
from storage.tiers.nvme import NvmeRegion
from tests.unit.storage.root_codec import ROOT, rounded

# OpenMP's threads spin while they wait for each other. On a busy machine a step of the reference would take seconds.
torch.set_num_threads(1)

MIB = 1 << 20
GRAD_SCALE = 0.5
# The shards of a group that is cut into three tiles, the last of them short, by an engine with these budgets.
TILED = (120_003, 17, 48_000)
ROOM_FOR_TILED = {"host_budget_bytes": 16 * MIB, "nvme_budget_bytes": 64 * MIB}
# The placement of states that a layout has in host memory.
ON_HOST: dict[str, Any] = {"weights": TierName.HOST, "moments": TierName.HOST}
OPTIMIZER_STATES = {Kind.EXP_AVG: "exp_avg", Kind.EXP_AVG_SQ: "exp_avg_sq"}

States = dict[tuple[str, str, Kind], torch.Tensor]


def on_nvme(region: Region | None) -> NvmeRegion:
    """Return the region of a version, which is on NVMe."""
    assert isinstance(region, NvmeRegion)
    return region


def check_tally(job: Job) -> None:
    """Check that a job's tally, which its slabs keep up to date, equals a count over all slabs."""
    tally, slabs = job.tally, list(job.slabs())
    backing, counts, versions = Counter[TierName | None](), Counter[Any](), Counter[TierName]()
    for slab in slabs:
        backing[slab.backing] += round_up(slab.nbytes)
        for tier, count in Counter(region.tier.name for region in slab.versions.values()).items():
            counts[slab.backing, tier, count] += round_up(slab.nbytes)
        for region in slab.versions.values():
            versions[region.tier.name] += region.nbytes
    # Counters that differ in zeros only are equal.
    assert tally.by_backing == backing and tally.by_versions == counts
    assert all(tally.version_bytes(tier) == versions[tier] for tier in TierName)
    assert tally.home_bytes == sum(round_up(slab.nbytes) for slab in slabs if slab.at_home_in_host)
    copies = [slab.copy for slab in slabs if slab.copy is not None]
    assert (tally.copies, tally.copied_bytes) == (len(copies), sum(copy.arena_range.nbytes for copy in copies))
    passing = [s for s in slabs if s.key.kind is Kind.PARAM and not s.at_home_in_host]
    assert tally.passing == sorted(round_up(slab.nbytes) for slab in passing)
    assert tally.unsaved.keys() == {s for s in slabs if s.latest is not None and s.latest not in s.versions}
    # Commits skip the slabs that are not in `changed`, so each of these must have nothing to record or to free.
    for slab in slabs:
        if slab not in tally.changed and slab.versions:
            (version,) = slab.versions
            assert version == slab.latest
            assert all(slab.version_at(step) == version for step in job.retained)
            assert job.spec.durability.every_steps == 0 or version in slab.recorded


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A job whose groups all have shards of `numels` elements. The sizes are odd on purpose."""

    name: str = "job"
    numels: tuple[int, ...] = (30_003, 17, 12_000)
    groups: tuple[str, ...] = ("block.0", "block.1")
    precision: DType = DType.FLOAT32
    weights: TierName = TierName.NVME
    moments: TierName = TierName.NVME
    gradients: TierName = TierName.HOST
    # The codec of the moments: PLAIN, that of root_codec.py, or a table of ranges. Shards whose moments are absent are
    # never updated.
    codec: str = PLAIN
    every_steps: int = 1
    world_size: int = 1
    # Whether each shard has no gradient in every fourth step.
    with_skips: bool = True

    @property
    def weight_kind(self) -> Kind:
        """The kind that has the fp32 weights."""
        return Kind.PARAM if self.precision is DType.FLOAT32 else Kind.MASTER

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that have slabs."""
        master = () if self.precision is DType.FLOAT32 else (Kind.MASTER,)
        return (Kind.PARAM, *master, Kind.EXP_AVG, Kind.EXP_AVG_SQ)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of each group, with FQNs that lack the group's name at the beginning."""
        shards, position = [], 0
        for index, numel in enumerate(self.numels):
            shards.append(Shard(fqn=f"weight.{index}", offset=0, numel=numel, group_offset=position))
            position += -(-numel // 16) * 16
        return tuple(shards)

    def codec_of(self, index: int) -> str:
        """Return the codec of the moments of one shard."""
        if self.codec == PLAIN:
            return PLAIN
        position = self.shards[index].group_offset
        return [codec.name for first, codec in codecs_named(self.codec) if first <= position][-1]

    def dtype(self, kind: Kind) -> DType:
        """Return the element type of a kind."""
        return self.precision if kind in (Kind.PARAM, Kind.GRAD) else DType.FLOAT32

    def group(self, name: str) -> GroupSpec:
        """Return one group as the engine registers it."""
        last = self.shards[-1]
        slabs = [
            SlabSpec(
                kind=kind,
                dtype=self.dtype(kind),
                placement=self.moments if kind in OPTIMIZER_STATES else self.weights,
                codec=self.codec if kind in OPTIMIZER_STATES else PLAIN,
            )
            for kind in self.kinds
        ]
        return GroupSpec(
            name=name,
            numel=-(-(last.group_offset + last.numel) // 16) * 16,
            shards=tuple(
                Shard(fqn=f"{name}.{s.fqn}", offset=0, numel=s.numel, group_offset=s.group_offset) for s in self.shards
            ),
            slabs=(*slabs, SlabSpec(kind=Kind.GRAD, dtype=self.precision, placement=self.gradients)),
        )

    def job(self) -> JobSpec:
        """Return the job as the engine opens it."""
        return JobSpec(
            name=self.name,
            world_size=self.world_size,
            local_ranks=1,
            parameters=tuple(
                ParameterSpec(fqn=shard.fqn, shape=(shard.numel,), dtype=self.precision, trainable=True)
                for group in self.groups
                for shard in self.group(group).shards
            ),
            durability=Durability(every_steps=self.every_steps),
        )

    def skips(self, step: int, index: int) -> bool:
        """Return whether shard `index` of each group has no gradient in `step`."""
        return (self.with_skips and (step + index) % 4 == 0) or self.codec_of(index) == AbsentCodec.name

    def hyper_parameters(self, step: int, index: int) -> HyperParameters | None:
        """Return the hyper-parameters of shard `index` in `step`; None if it has no gradient.

        Each shard has its own, and the learning rate changes from step to step.
        """
        if self.skips(step, index):
            return None
        updates = sum(not self.skips(s, index) for s in range(1, step + 1))
        return HyperParameters(adamw=pb.AdamW(**self._adamw(step, index), update_count=updates))

    def _adamw(self, step: int, index: int) -> dict[str, float]:
        return {
            "lr": 1e-2 * (index + 1) * 0.9**step,
            "beta1": 0.9 - 0.1 * index,
            "beta2": 0.999 - 0.01 * index,
            "eps": 1e-8,
            "weight_decay": 0.05 * index,
        }


@dataclass(kw_only=True)
class Reference:
    """The training of a layout by torch alone."""

    layout: Layout
    _states: list[States] = field(default_factory=list)
    _weights: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    _optimizers: dict[tuple[str, int], torch.optim.AdamW] = field(default_factory=dict)

    def gradient(self, step: int, group: str, index: int) -> torch.Tensor:
        """Return a shard's gradient before scaling, [numel] in the layout's precision."""
        return self._random(f"{group} {index} {step}", index).to(self.layout.precision.torch)

    def initial(self, group: str, index: int) -> torch.Tensor:
        """Return a shard's initial weight, [numel] in fp32."""
        return self._random(f"{group} {index}", index)

    def states(self, step: int) -> States:
        """Return every shard's tensor of every kind after `step`."""
        while len(self._states) <= step:
            self._advance(len(self._states))
        return self._states[step]

    def _random(self, seed: str, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(seed)) % (1 << 62))
        return torch.randn(self.layout.numels[index], generator=generator)

    def _advance(self, step: int) -> None:
        states: States = {}
        for group in self.layout.groups:
            for index in range(len(self.layout.numels)):
                weight = self._update(step, group, index)
                fqn = f"{group}.weight.{index}"
                states[group, fqn, self.layout.weight_kind] = weight.detach().clone()
                if self.layout.weight_kind is Kind.MASTER:
                    states[group, fqn, Kind.PARAM] = weight.detach().to(self.layout.precision.torch)
                optimizer_state = self._optimizers[group, index].state[weight]
                for kind, name in OPTIMIZER_STATES.items():
                    states[group, fqn, kind] = optimizer_state.get(name, torch.zeros(len(weight))).clone()
        self._states.append(states)

    def _update(self, step: int, group: str, index: int) -> torch.Tensor:
        layout = self.layout
        if step == 0:
            weight = self._weights[group, index] = self.initial(group, index).requires_grad_()
            self._optimizers[group, index] = torch.optim.AdamW([weight], fused=True)
            return weight
        weight, optimizer = self._weights[group, index], self._optimizers[group, index]
        if not layout.skips(step, index):
            adamw = layout._adamw(step, index)
            betas = adamw.pop("beta1"), adamw.pop("beta2")
            optimizer.param_groups[0] |= adamw | {"betas": betas}
            weight.grad = self.gradient(step, group, index).float() * GRAD_SCALE
            optimizer.step()
            if layout.codec_of(index) == ROOT.name:
                for name in OPTIMIZER_STATES.values():
                    optimizer.state[weight][name].copy_(rounded(optimizer.state[weight][name]))
        return weight


def reference_of(layout: Layout) -> Reference:
    """Return torch's training of a layout. Layouts that differ only in name, tiers and durability share it."""
    same = replace(layout, name="", weights=TierName.NVME, moments=TierName.NVME, every_steps=1, world_size=1)
    return _reference(same)


@cache
def _reference(layout: Layout) -> Reference:
    return Reference(layout=layout)


async def as_it_is(_: Gradient) -> None:
    """Leave a gradient where it is."""


class Training:
    """A layout's training on an engine, with torch's training as the reference."""

    def __init__(self, engine: Engine, layout: Layout) -> None:
        self.engine = engine
        self.layout = layout
        self.reference = reference_of(layout)
        self.job: Job

    async def begin(self) -> Training:
        """Open the job as a new one, and commit its initial values as step 0."""
        await self.open(must_exist=False)
        await self.stage_all()
        await self.engine.commit(self.job, 0, {0: b"0"}, 0)
        return self

    async def open(self, *, must_exist: bool = True) -> Training:
        """Open the job and register its groups."""
        self.job = await self.engine.open_job(self.layout.job(), may_exist=True, must_exist=must_exist)
        await self.engine.register(self.job, [self.layout.group(name) for name in self.layout.groups])
        return self

    async def stage_all(self) -> None:
        """Write and publish the initial values of all groups."""
        for group in self.layout.groups:
            for kind in {Kind.PARAM, self.layout.weight_kind}:
                pin = await self.engine.pins.stage(self.job, group, kind)
                tensor = self.engine.host.tensor(pin.arena_range, self.layout.dtype(kind), pin.slab.numel).zero_()
                for index, shard in enumerate(self.layout.shards):
                    tensor[shard.group_offset :][: shard.numel] = self.reference.initial(group, index)
                await self.engine.pins.publish(pin)

    async def step(self, *, settled: int | None = None) -> bool:
        """Train and commit the next step, and return whether it is durable already."""
        step = self.job.next_step
        await self.hand_over()
        return await self.commit(step, settled=settled)

    async def commit(self, step: int, *, settled: int | None = None) -> bool:
        """Commit a step, and return whether it is durable. All ranks have committed `settled` (None: this step)."""
        return await self.engine.commit(self.job, step, {0: str(step).encode()}, step if settled is None else settled)

    async def hand_over(
        self,
        groups: Sequence[str] | None = None,
        wrap: Callable[[Kernel], Kernel] = lambda kernel: kernel,
        position: float = NEVER,
        before_update: Callable[[Gradient], Awaitable[None]] = as_it_is,
        *,
        aside: bool = False,
        is_last_use: bool = False,
    ) -> None:
        """Give the gradients of the next step to the engine, which starts the updates.

        Args:
            groups: the groups to update; None: all.
            wrap: a function that replaces each kernel.
            position: the trace position at which the groups are needed next.
            before_update: called with each gradient when it has its values.
            aside: see PendingSteps.update.
            is_last_use: whether the gradients are freed when they are used up, see Gradients.free_when_used_up.
        """
        step, layout = self.job.next_step, self.layout
        for group in layout.groups if groups is None else groups:
            spec = layout.group(group)
            gradient = await self.engine.pending_steps.allocate_gradient(self.job, group)
            tensor = self.engine.gradients.tensor(gradient)
            for index, shard in enumerate(layout.shards):
                tensor[shard.group_offset :][: shard.numel] = self.reference.gradient(step, group, index)
            update = OptimizerUpdate(
                shards=spec.shards,
                hyper_parameters=[layout.hyper_parameters(step, index) for index in range(len(layout.shards))],
                grad_scale=GRAD_SCALE,
            )
            await before_update(gradient)
            self.engine.pending_steps.update(
                self.job,
                step,
                group,
                gradient,
                wrap(update),
                position=position,
                keeps_gradient=is_last_use,
                aside=aside,
            )
            if is_last_use:
                self.engine.gradients.free_when_used_up(gradient)

    async def finish_updates(self) -> None:
        """Wait until all updates of the pending step that were handed over are done. The step is not sealed by this."""
        assert self.job.pending is not None
        await asyncio.wait(set(self.job.pending.writes.values()))

    async def assert_at(self, step: int, *, as_of: int | None = None) -> None:
        """Check that the bytes of every shard and kind are those of torch after `step`, bit for bit.

        They are the newest bytes, for which this waits, or those as of a committed step.
        """
        different = []
        for group in self.layout.groups:
            for kind in self.layout.kinds:
                pin = await self.engine.pins.fetch(self.job, group, kind, as_of=as_of)
                stored = self.engine.host.tensor(pin.arena_range, self.layout.dtype(kind), pin.slab.numel).clone()
                self.engine.pins.unpin(pin)
                for shard in self.layout.group(group).shards:
                    expected = self.reference.states(step)[group, shard.fqn, kind]
                    if not torch.equal(stored[shard.group_offset :][: shard.numel], expected):
                        different.append(f"{shard.fqn} {kind.value}")
        assert different == [], f"not the bits of step {step}"
        check_tally(self.job)

    async def assert_goes_on_from(self, step: int) -> None:
        """Check the bytes as `assert_at` does, train the next step, and check the bytes after it, too."""
        await self.assert_at(step)
        await self.step()
        await self.assert_at(step + 1)

    @property
    def version_bytes(self) -> int:
        """The bytes of one version of every slab, in whole pages."""
        return sum(-(-slab.nbytes // 4096) * 4096 for slab in self.job.slabs())


@contextmanager
def held_up() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Yield two events for `waiting_for`: a kernel has begun; kernels may go on (set at the block's end)."""
    begun, go_on = threading.Event(), threading.Event()
    try:
        yield begun, go_on
    finally:
        go_on.set()


def waiting_for(begun: threading.Event, go_on: threading.Event, kernel: Kernel) -> Kernel:
    """Return a kernel that sets `begun`, waits for `go_on`, and then calls `kernel`."""

    def wait(tile: UpdateTile) -> None:
        begun.set()
        go_on.wait()
        kernel(tile)

    return wait


@asynccontextmanager
async def updating(
    training: Training, groups: Sequence[str] | None = None, **options: Any
) -> AsyncIterator[threading.Event]:
    """Hand over the gradients of the next step, and hold the kernels of its updates up until an event is set.

    The block begins when the first kernel has begun, and gets the event, which is set at the end of the block, too.

    Args:
        training: the training.
        groups: see Training.hand_over.
        options: see Training.hand_over.
    """
    with held_up() as (begun, go_on):
        await training.hand_over(groups, wrap=lambda kernel: waiting_for(begun, go_on, kernel), **options)
        await asyncio.to_thread(begun.wait)
        yield go_on


@contextmanager
def room_taken(engine: Engine, later_than: float = NEVER) -> Iterator[None]:
    """Take all host memory during the block that is free or is held by copies next used after `later_than`."""
    taken = []
    while region := engine.host.try_allocate(PAGE_BYTES, later_than):
        taken.append(region)
    try:
        yield
    finally:
        for region in taken:
            engine.host.free(region)


def engine_config(state_dir: Path, **changes: Any) -> EngineConfig:
    """Return a config with the smallest tiles, 3 MiB of host memory besides them, and a small data file."""
    values = {"host_budget_bytes": 4992 << 10, "nvme_budget_bytes": 16 * MIB} | changes
    return EngineConfig(state_dir=state_dir, **values)


@asynccontextmanager
async def opened(
    state_dir: Path,
    volatile: Sequence[BackingTier[Any]] = (),
    copies: Sequence[CopyTier[Any]] = (),
    /,
    **changes: Any,
) -> AsyncIterator[Engine]:
    """Open an engine; at the end of the block check that nothing leaked, and close it."""
    engine = await Engine.open(engine_config(state_dir, **changes), volatile, copies)
    try:
        base = engine.host.used_bytes
        yield engine
        await quiesce(engine)
        await assert_nothing_leaked(engine, base)
    finally:
        await engine.close()


async def quiesce(engine: Engine) -> None:
    """Abandon pending steps, and wait for prefetches and snapshots."""
    for job in engine.jobs.by_name.values():
        await engine.pending_steps.abandon(job)
        if job.snapshot is not None:
            await asyncio.wait([job.snapshot])
    while engine.queue.depth or engine.queue.sending:
        await asyncio.sleep(0.001)


async def assert_nothing_leaked(engine: Engine, host_base_bytes: int) -> None:
    """Check that a slab's version or copy explains every used byte, no extents overlap, and no allocation waits."""
    jobs = [layout for name in engine.jobs.by_name for layout in engine.jobs.layouts(name)]
    jobs += [kept for name in engine.jobs.kept for kept in engine.jobs.kept_steps(name).values()]
    # Each region once, because a kept step shares regions with its job.
    regions = dict.fromkeys(region for job in jobs for slab in job.slabs() for region in slab.versions.values())
    extents = [extent for r in regions if r.tier is engine.nvme for extent in on_nvme(r).extents]
    for file in engine.nvme.files:
        unused_runs(file.size_bytes, [extent for extent in extents if extent.file == file.number])
    host, *backing = accounts = await engine.accountant.take()
    assert all(account.is_balanced for account in accounts), accounts
    assert host.held_bytes[Holder.FIXED] == host_base_bytes
    assert all(account.held_bytes.get(Holder.READERS, 0) == 0 for account in backing)
    assert not any(job.tally.being_filled.total() for job in jobs)
    assert engine.host_cache.leased_bytes == 0
    assert engine.scratch.nbytes == 0
    assert engine.gradients.spilled_bytes == engine.gradients.parked_bytes == 0
    assert engine.host.queue_depth == 0


def flip(engine: Engine, offset: int) -> None:
    """Flip one bit of the data file."""
    with (engine.config.state_dir / "data.0").open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


class Fault:
    """A replacement of one function of `storage.base.syscalls` that counts its calls and can fail some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        self.calls = 0
        self._lock = threading.Lock()
        self._real = getattr(syscalls, function)
        self._fails: Callable[[int], bool] = lambda _: False
        self._error: Exception = AssertionError("no error was chosen")
        monkeypatch.setattr(syscalls, function, self._call)

    def fail(self, error: Exception, when: Callable[[int], bool] = lambda _: True) -> None:
        """Make the calls fail for whose numbers `when` returns true; the next call has the number 0."""
        self.calls = 0
        self._error, self._fails = error, when

    def heal(self) -> None:
        """End the failures, and count from 0 again."""
        self.calls = 0
        self._fails = lambda _: False

    def _call(self, *args: Any) -> Any:
        with self._lock:
            number, self.calls = self.calls, self.calls + 1
        if self._fails(number):
            raise self._error
        return self._real(*args)


@contextmanager
def late_reads(engine: Engine) -> Iterator[asyncio.Event]:
    """Make the reads that begin in the block return after an event, which this yields, although they are done before.

    The reader has to come to its read within the block.
    """
    read, may_return = engine.nvme.read_into, asyncio.Event()

    async def late(*arguments: Any) -> None:
        await read(*arguments)
        await may_return.wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.nvme, "read_into", late)
        yield may_return


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, function: str, *, when: bool = True) -> Iterator[threading.Event]:
    """Make all calls of a function of `storage.base.syscalls` wait during the block; yield the event that ends them."""
    go_on, real = threading.Event(), getattr(syscalls, function)
    if not when:
        go_on.set()

    def wait_first(*args: Any) -> Any:
        assert go_on.wait(20)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(syscalls, function, wait_first)
        try:
            yield go_on
        finally:
            go_on.set()
