"""The worker, which trains all jobs on one engine until it is killed, and announces every act before and after it.

It runs in a forked process. It compares the bytes that it reads with its own copy of the oracle.
"""

from __future__ import annotations

import asyncio
import os
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import uvloop

from storage.base.config import EngineConfig
from storage.base.errors import NotFoundError
from storage.base.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.engine import Engine
from storage.state.versions import Job
from storage.steps.tile import UpdateTile
from tests.faults.jobs import FACTORS, JobShape, gradient, updates
from tests.faults.oracle import Act, Announcement, Oracle

MIB = 1 << 20
STEPS_OF_A_SHORT_LIFE = (2, 8)
# The most steps that are kept of a job at once.
MOST_KEPT = 2

Announce = Callable[[Announcement], None]


def engine_config(state_dir: Path) -> EngineConfig:
    """Return a configuration with small budgets, so that a tile has few elements."""
    return EngineConfig(
        state_dir=state_dir,
        host_budget_bytes=4992 << 10,
        nvme_budget_bytes=32 * MIB,
        io_read_threads=2,
        io_write_threads=2,
    )


def job_spec(shape: JobShape) -> JobSpec:
    """Return the job as the engine opens it, with one parameter per group."""
    dtype = DType.BFLOAT16 if shape.half else DType.FLOAT32
    return JobSpec(
        name=shape.name,
        world_size=shape.world_size,
        local_ranks=1,
        parameters=tuple(
            ParameterSpec(fqn=f"{name}.weight", shape=(numel,), dtype=dtype, trainable=True)
            for name, numel in shape.groups.items()
        ),
        durability=Durability(every_steps=shape.every_steps),
    )


def group_specs(shape: JobShape) -> list[GroupSpec]:
    """Return the groups as the engine registers them."""
    param = DType.BFLOAT16 if shape.half else DType.FLOAT32
    moments = TierName.HOST if shape.moments_on_host else TierName.NVME
    slabs = tuple(
        SlabSpec(
            kind=Kind(kind),
            dtype=param if kind == "param" else DType.FLOAT32,
            placement=moments if kind.startswith("exp_avg") else TierName.NVME,
        )
        for kind in shape.kinds
    )
    gradients = SlabSpec(kind=Kind.GRAD, dtype=param, placement=TierName.HOST)
    return [
        GroupSpec(
            name=name,
            numel=numel,
            shards=(Shard(fqn=f"{name}.weight", offset=0, numel=numel, group_offset=0),),
            slabs=(*slabs, gradients),
        )
        for name, numel in shape.groups.items()
    ]


def apply_rule(tile: UpdateTile) -> None:
    """Apply the update rule of tests.faults.jobs to a tile."""
    tile.scratch.copy_(tile.gradient)
    weight_kind = Kind.MASTER if Kind.MASTER in tile.tensors else Kind.PARAM
    for name, (factor, gain) in FACTORS.items():
        values = tile.tensors[weight_kind if name == "weight" else Kind(name)]
        values.mul_(factor).add_(tile.scratch * gain)
    if weight_kind is Kind.MASTER:
        tile.tensors[Kind.PARAM].copy_(tile.tensors[Kind.MASTER])


async def different_slabs(engine: Engine, oracle: Oracle, job: Job, step: int) -> list[str]:
    """Compare all slabs of a job with the oracle's bytes of `step`, its newest step; return one text per difference."""
    name, found = job.spec.name, []
    for group in oracle.jobs[name].shape.groups:
        for kind in oracle.jobs[name].shape.kinds:
            pin = await engine.pins.fetch(job, group, Kind(kind))
            if bytes(engine.host.view(pin.arena_range)[: pin.slab.nbytes]) != oracle.expected(name, step, group, kind):
                found.append(f"{pin.slab.key} does not have the bytes of step {step}")
            engine.pins.unpin(pin)
    return found


async def different_kept_steps(engine: Engine, oracle: Oracle, name: str) -> list[str]:
    """Compare all kept steps of a job with the oracle's bytes; return one text per difference."""
    found = []
    history = oracle.jobs[name]
    for kept, path in {**history.coming, **history.kept}.items():
        if kept not in engine.jobs.kept_steps(name):
            continue
        reader = await engine.step_readers.open(engine.kept_steps.find(name, kept))
        try:
            if reader.step != len(path) - 1 or reader.client_state(0) != f"state {reader.step}".encode():
                found.append(f"{name} keeps step {reader.step} as {kept}, and kept {len(path) - 1}")
            for group, numel in history.shape.groups.items():
                for kind in history.shape.kinds:
                    pieces = [piece async for piece in reader.read(f"{group}.weight", Kind(kind), 0, numel)]
                    if b"".join(pieces) != oracle.states_after(name, path)[group][kind].tobytes():
                        found.append(f"{group} {kind} of {name}, kept as {kept}, is not that of step {reader.step}")
        finally:
            reader.close()
    return found


async def space_errors(engine: Engine) -> list[str]:
    """Check the space of the tiers while no operation is under way and no reader is open.

    Every used byte must be a job's or a kept step's, and no extent may belong to two versions.

    Returns:
        One text per error.
    """
    accounts = await engine.accountant.take()
    errors = [f"{account} is not what the jobs explain" for account in accounts if not account.is_balanced]
    kept = [step for name in engine.jobs.kept for step in engine.jobs.kept_steps(name).values()]
    jobs = [*engine.jobs.by_name.values(), *kept]
    # A kept step shares regions with its job, so each region is looked at once.
    regions = dict.fromkeys(r for job in jobs for slab in job.slabs() for r in slab.versions.values())
    end = (-1, 0)
    for extent in sorted(
        (e for r in regions for e in engine.backing.durable.stored(r)[0]), key=lambda e: (e.file, e.offset)
    ):
        if extent.file == end[0] and extent.offset < end[1]:
            errors.append(f"{extent} overlaps the one before it, which ends at {end[1]}")
        end = extent.file, extent.offset + extent.nbytes
    return errors


@dataclass(slots=True, eq=False)
class Trainer:
    """The training of one job."""

    engine: Engine
    shape: JobShape
    oracle: Oracle
    announce: Announce
    rng: random.Random
    job: Job
    last_step: int

    @classmethod
    async def resume(
        cls, engine: Engine, shape: JobShape, oracle: Oracle, announce: Announce, rng: random.Random
    ) -> Trainer:
        """Open the job and return its trainer; commit its initial values if it is new."""
        job = await engine.open_job(job_spec(shape), may_exist=True, must_exist=False)
        trainer = cls(engine, shape, oracle, announce, rng, job, rng.randint(*STEPS_OF_A_SHORT_LIFE))
        await engine.register(job, group_specs(shape))
        known = oracle.jobs[shape.name].newest
        assert job.newest == known, f"job {shape.name} resumes at step {job.newest}, and was found at {known}"
        if job.newest is None:
            await trainer.begin()
        return trainer

    async def begin(self) -> None:
        """Write and commit the initial values as step 0."""
        salt = self.rng.getrandbits(32)
        # The commit is announced first, because the oracle computes the initial bytes from the announced salt.
        self.announce(Announcement(act=Act.COMMITS, job=self.shape.name, step=0, salt=salt))
        for group in self.shape.groups:
            for kind in {"param", self.shape.weight_kind}:
                pin = await self.engine.pins.stage(self.job, group, Kind(kind))
                values = self.oracle.expected(self.shape.name, 0, group, kind)
                self.engine.host.view(pin.arena_range)[: len(values)] = values
                await self.engine.pins.publish(pin)
        await self.commit(0, 0)

    async def lap(self) -> None:
        """Do one to four random acts."""
        for _ in range(self.rng.randint(1, 4)):
            acts = [self.step, self.roll_back, self.abandon, self.prefetch, self.read, self.keep, self.read_kept]
            await self.rng.choices(acts, [70, 8, 6, 8, 8, 12, 3])[0]()
        if self.shape.short_lived and self.job.next_step > self.last_step:
            await self.live_again()

    async def step(self) -> None:
        """Train and commit one step, sometimes while readers are open."""
        step, salt = self.job.next_step, self.rng.getrandbits(32)
        settled = step - self.rng.choice([0, 1])
        await self.hand_over(salt)
        self.announce(Announcement(act=Act.COMMITS, job=self.shape.name, step=step, salt=salt, settled=settled))
        readers = [asyncio.ensure_future(self.read_beside()) for _ in range(self.rng.choice([0, 0, 0, 1, 3]))]
        await self.commit(step, settled)
        await asyncio.gather(*readers)

    async def read_beside(self) -> None:
        """Open a reader of the newest step while the next one may be committed, and compare what it reads."""
        await asyncio.sleep(self.rng.choice([0, 0, 0.0005, 0.002]))
        if self.rng.random() < 0.2:
            await self.cancel_a_reader()
            return
        reader = await self.engine.step_readers.open(self.job)
        try:
            for group, numel in self.shape.groups.items():
                for kind in self.shape.kinds:
                    pieces = reader.read(f"{group}.weight", Kind(kind), 0, numel)
                    found = b"".join([piece async for piece in pieces])
                    expected = self.oracle.expected(self.shape.name, reader.step, group, kind)
                    assert found == expected, f"a reader of step {reader.step} of {self.shape.name}: {group} {kind}"
        finally:
            reader.close()

    async def cancel_a_reader(self) -> None:
        """Cancel the opening of a reader. The engine must release all that the reader held."""
        opening = asyncio.ensure_future(self.engine.step_readers.open(self.job))
        await asyncio.sleep(self.rng.choice([0, 0.0002, 0.001]))
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            opening.result().close()

    async def hand_over(self, salt: int) -> None:
        """Give the engine the gradients of the next step, which start its updates."""
        for group in updates(self.shape, salt):
            values = await self.engine.pending_steps.allocate_gradient(self.job, group)
            self.engine.gradients.tensor(values).copy_(torch.from_numpy(gradient(self.shape, group, salt)))
            self.engine.pending_steps.update(self.job, self.job.next_step, group, values, apply_rule)

    async def commit(self, step: int, settled: int) -> None:
        """Commit a step after all its gradients were handed over. `settled` is the newest step of all ranks."""
        await self.engine.commit(self.job, step, {0: f"state {step}".encode()}, settled)
        self.announce(Announcement(act=Act.COMMITTED, job=self.shape.name, step=step, durable=self._durable))

    async def roll_back(self) -> None:
        """Roll back to the step before, or to the last durable one if the steps after it are in memory only."""
        older = self.job.durable if self.shape.every_steps > 1 else {s for s in self.job.retained if s < self._newest}
        if not older:
            return
        may_be_replaced = self.has_snapshot_under_way
        try:
            await self.roll_back_to(max(older))
        except NotFoundError:
            # The engine first waits for the snapshot under way, which then replaces the older one.
            assert may_be_replaced, "a durable step is gone, and no snapshot has replaced it"

    async def roll_back_to(self, step: int) -> None:
        """Roll back to a retained step, which becomes the newest one."""
        self.announce(Announcement(act=Act.ROLLS_BACK, job=self.shape.name, step=step))
        await self.engine.roll_back(self.job, step)
        self.announce(Announcement(act=Act.ROLLED_BACK, job=self.shape.name, step=step))

    async def wait_for_updates(self) -> None:
        """Wait until the updates of all handed-over gradients are done; they are not committed yet."""
        for group in self.shape.groups:
            self.engine.pins.unpin(await self.engine.pins.fetch(self.job, group, Kind.PARAM))

    async def abandon(self) -> None:
        """Begin a step without announcing it, and abandon it when some of it may be written."""
        await self.hand_over(self.rng.getrandbits(32))
        await asyncio.sleep(self.rng.choice([0, 0.002]))
        await self.engine.pending_steps.abandon(self.job)

    async def prefetch(self) -> None:
        """Prefetch some slabs in a random order, and do not use them."""
        wants = [(group, Kind(kind)) for group in self.shape.groups for kind in self.shape.kinds]
        self.rng.shuffle(wants)
        self.engine.pins.prefetch(self.shape.name, self.job, [(*want, float(i)) for i, want in enumerate(wants[:4])])

    async def read(self) -> None:
        """Compare all bytes with the oracle's."""
        found = await different_slabs(self.engine, self.oracle, self.job, self._newest)
        assert not found, "\n".join(found)

    async def keep(self) -> None:
        """Keep the newest step under a new name, after a kept one was forgotten if there are several."""
        kept = self.oracle.jobs[self.shape.name].kept
        if len(kept) >= MOST_KEPT:
            name = self.rng.choice(list(kept))
            self.announce(Announcement(act=Act.FORGETS, job=self.shape.name, name=name))
            await self.engine.kept_steps.forget(self.shape.name, name)
            self.announce(Announcement(act=Act.FORGOT, job=self.shape.name, name=name))
        name = f"{self._newest} {self.rng.getrandbits(32)}"
        self.announce(Announcement(act=Act.KEEPS, job=self.shape.name, step=self._newest, name=name))
        await self.engine.kept_steps.keep(self.job, self._newest, name)
        self.announce(Announcement(act=Act.KEPT, job=self.shape.name, step=self._newest, name=name))

    async def read_kept(self) -> None:
        """Compare the bytes of all kept steps with the oracle's."""
        found = await different_kept_steps(self.engine, self.oracle, self.shape.name)
        assert not found, "\n".join(found)

    async def live_again(self) -> None:
        """Delete the job and begin it anew."""
        self.engine.queue.replace_window(self.shape.name, [])
        self.announce(Announcement(act=Act.DELETES, job=self.shape.name))
        await self.engine.delete_job(self.shape.name)
        self.announce(Announcement(act=Act.DELETED, job=self.shape.name))
        again = await Trainer.resume(self.engine, self.shape, self.oracle, self.announce, self.rng)
        self.job, self.last_step = again.job, again.last_step

    @property
    def has_snapshot_under_way(self) -> bool:
        """Whether a step that must become durable is not durable yet."""
        every = self.shape.every_steps
        return every > 1 and self._newest // every * every not in self.job.durable

    @property
    def _newest(self) -> int:
        newest = self.job.newest
        assert newest is not None
        return newest

    @property
    def _durable(self) -> int | None:
        return max(self.job.durable, default=None)


async def train(
    state_dir: Path, oracle: Oracle, announce: Announce, rng: random.Random, ready: Callable[[], None]
) -> None:
    """Train all jobs until the process is killed. Call `ready` when the engine is open."""
    engine = await Engine.open(engine_config(state_dir))
    ready()
    announce(Announcement(act=Act.TRAINING))
    trainers = await asyncio.gather(
        *(
            Trainer.resume(engine, history.shape, oracle, announce, random.Random(rng.getrandbits(64)))
            for history in oracle.jobs.values()
        )
    )
    while True:
        await asyncio.gather(*(trainer.lap() for trainer in trainers))
        if not any(trainer.has_snapshot_under_way for trainer in trainers):
            # Prefetches under way keep their extents until they end, and the accounts would not explain these.
            while engine.queue.depth:
                await asyncio.sleep(0.001)
            errors = await space_errors(engine)
            assert not errors, "\n".join(errors)


def run(state_dir: Path, oracle: Oracle, pipe: int, seed: int, ready: Callable[[], None]) -> int:
    """Run the worker in the present process, and return its exit status. It ends by itself only after an error."""

    def announce(said: Announcement) -> None:
        # The pipe gets the announcement first, so that the driver has it even if this process's own oracle rejects it.
        os.write(pipe, f"{said.dump()}\n".encode())
        oracle.hear(said)

    try:
        uvloop.run(train(state_dir, oracle, announce, random.Random(seed), ready))
    except BaseException:
        os.write(pipe, f"{Announcement(act=Act.FAILED, text=traceback.format_exc()[-3000:]).dump()}\n".encode())
    return 1
