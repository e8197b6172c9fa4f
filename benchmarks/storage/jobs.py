"""Jobs for the benchmarks of the engine: equal groups, bf16 parameters with fp32 states, all slabs on NVMe.

A step hands a constant gradient to AdamW, or to a kernel that does nothing, and commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.measure import Threads
from paramserver.optimizer_kernel import OptimizerUpdate
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.config import EngineConfig
from storage.base.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.engine import Engine
from storage.memory.parkable import Gradient
from storage.state.versions import Job
from storage.steps.tile import Kernel, UpdateTile

JOB = "bench"
STATE_KINDS = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkLayout:
    """`groups` groups with one parameter of `numel` elements each."""

    groups: int
    numel: int

    @property
    def slabs(self) -> int:
        """The number of slabs of the job, without gradients."""
        return self.groups * (1 + len(STATE_KINDS))

    @property
    def read_bytes(self) -> int:
        """The bytes that the updates of a step read from NVMe: master weights and moments, 12 per element."""
        return self.groups * self.numel * 12

    @property
    def written_bytes(self) -> int:
        """The bytes that the updates of a step write to NVMe: the same, and the bf16 parameters."""
        return self.groups * self.numel * 14

    def group_specs(self) -> list[GroupSpec]:
        """Return the specifications with which the engine registers the groups."""
        states = [SlabSpec(kind=kind, dtype=DType.FLOAT32, placement=TierName.NVME) for kind in STATE_KINDS]
        slabs = (
            SlabSpec(kind=Kind.PARAM, dtype=DType.BFLOAT16, placement=TierName.NVME),
            *states,
            SlabSpec(kind=Kind.GRAD, dtype=DType.BFLOAT16, placement=TierName.HOST),
        )
        return [
            GroupSpec(
                name=parameter.fqn,
                numel=self.numel,
                shards=(Shard(fqn=parameter.fqn, offset=0, numel=self.numel, group_offset=0),),
                slabs=slabs,
            )
            for parameter in self.job_spec().parameters
        ]

    def job_spec(self) -> JobSpec:
        """Return the specification with which the engine opens the job."""
        return JobSpec(
            name=JOB,
            world_size=1,
            local_ranks=1,
            parameters=tuple(
                ParameterSpec(fqn=f"block.{i}", shape=(self.numel,), dtype=DType.BFLOAT16, trainable=True)
                for i in range(self.groups)
            ),
            durability=Durability(every_steps=1),
        )


class Training:
    """A job on an engine, trained step by step."""

    def __init__(self, engine: Engine, job: Job, specs: list[GroupSpec]) -> None:
        self.engine = engine
        self.job = job
        self._specs = specs

    async def initialize(self) -> None:
        """Commit constants as the initial values."""
        for spec in self._specs:
            for kind in (Kind.PARAM, Kind.MASTER):
                pin = await self.engine.pins.stage(self.job, spec.name, kind)
                self.engine.host.tensor(pin.arena_range, spec.slab_of_kind[kind].dtype, spec.numel).fill_(0.02)
                await self.engine.pins.publish(pin)
        await self.commit()

    async def gradients(self) -> list[Gradient]:
        """Allocate and fill the gradients of all groups in the arena, and return them."""
        gradients = [await self.engine.pending_steps.allocate_gradient(self.job, spec.name) for spec in self._specs]
        for gradient in gradients:
            self.engine.gradients.tensor(gradient).fill_(1e-3)
        return gradients

    async def update(self, gradients: list[Gradient], kernel_of: Callable[[GroupSpec, int], Kernel]) -> None:
        """Hand over the gradients of the next step, and wait until all groups are updated.

        Raises:
            StorageError: an update failed.
        """
        step = self.job.next_step
        for spec, gradient in zip(self._specs, gradients, strict=True):
            self.engine.pending_steps.update(self.job, step, spec.name, gradient, kernel_of(spec, step))
        await asyncio.gather(*self.job.open_pending(step).writes.values())

    async def commit(self) -> None:
        """Commit the step that was updated, which makes it durable."""
        step = self.job.next_step
        await self.engine.commit(self.job, step, {0: b""}, step)


def adamw(spec: GroupSpec, step: int) -> Kernel:
    """Return a kernel that does an AdamW update with usual hyper-parameters."""
    adamw = pb.AdamW(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, update_count=step)
    row = pb.ApplyGradientsRequest.HyperParameters(adamw=adamw)
    return OptimizerUpdate(shards=spec.shards, hyper_parameters=[row], grad_scale=1.0)


def nothing(_: GroupSpec, __: int) -> Kernel:
    """Return a kernel that changes no bytes."""

    def kernel(_: UpdateTile) -> None:
        return

    return kernel


@asynccontextmanager
async def training(
    layout: BenchmarkLayout, state_dir: Path, threads: Threads, *, host_budget_bytes: int
) -> AsyncIterator[Training]:
    """Yield a job whose initial values are committed as step 0, on an engine without copies in host memory."""
    config = EngineConfig(
        state_dir=state_dir,
        host_budget_bytes=host_budget_bytes,
        # There is room for two versions of everything, for small slabs, which take whole pages, and for the large
        # pieces by which the file grows.
        nvme_budget_bytes=2 * layout.written_bytes + layout.slabs * 8192 + (256 << 20),
        io_read_threads=threads.read,
        io_write_threads=threads.write,
    )
    async with _opened(config, layout, may_exist=False) as run:
        await run.initialize()
    # The engine is opened anew, because the copies that staging left in host memory would save updates some reads.
    async with _opened(config, layout, may_exist=True) as run:
        yield run


@asynccontextmanager
async def _opened(config: EngineConfig, layout: BenchmarkLayout, *, may_exist: bool) -> AsyncIterator[Training]:
    engine = await Engine.open(config)
    engine.host.arena.finish_collapse()
    try:
        job = await engine.open_job(layout.job_spec(), may_exist=may_exist, must_exist=may_exist)
        specs = layout.group_specs()
        await engine.register(job, specs)
        yield Training(engine, job, specs)
    finally:
        await engine.close()
