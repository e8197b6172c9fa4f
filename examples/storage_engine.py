"""Uses the storage engine alone, without daemon, gRPC or model. Run it with a directory on your NVMe disk.

It commits two steps of an update rule of its own, reads both through readers that hold them, and prints the used bytes.
"""

from __future__ import annotations

import argparse
import array
from pathlib import Path

import uvloop

from storage.base.config import EngineConfig
from storage.base.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.base.tune_interpreter import tune_interpreter
from storage.engine import Engine
from storage.state.versions import Job
from storage.steps.reader import StepReader
from storage.steps.tile import UpdateTile

NUMEL = 1 << 20
MIB = 1 << 20

WEIGHT = ParameterSpec(fqn="weight", shape=(NUMEL,), dtype=DType.FLOAT32, trainable=True)
# The group has one shard with two kinds of bytes on NVMe; its gradients are in host memory.
GROUP = GroupSpec(
    name="all",
    numel=NUMEL,
    shards=(Shard(fqn="weight", offset=0, numel=NUMEL, group_offset=0),),
    slabs=(
        SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=TierName.NVME),
        SlabSpec(kind=Kind.EXP_AVG, dtype=DType.FLOAT32, placement=TierName.NVME),
        SlabSpec(kind=Kind.GRAD, dtype=DType.FLOAT32, placement=TierName.HOST),
    ),
)
# With every_steps=1, every committed step survives kill -9 and power loss.
JOB = JobSpec(name="example", world_size=1, local_ranks=1, parameters=(WEIGHT,), durability=Durability(every_steps=1))


def descend(tile: UpdateTile) -> None:
    """Update one tile (a piece of the shard) by gradient descent with momentum; the engine calls this on a thread."""
    momentum = tile.tensors[Kind.EXP_AVG].mul_(0.5).add_(tile.gradient)
    tile.tensors[Kind.PARAM].sub_(momentum)


async def begin(engine: Engine) -> Job:
    """Return the job at its last committed step; a new job gets its initial values as step 0."""
    job = await engine.open_job(JOB, may_exist=True, must_exist=False)
    await engine.register(job, [GROUP])
    if job.newest is None:
        pin = await engine.pins.stage(job, "all", Kind.PARAM)
        engine.host.tensor(pin.arena_range, DType.FLOAT32, NUMEL).fill_(1.0)
        await engine.pins.publish(pin)
        await engine.commit(job, 0, {0: b"whatever the client wants to find again"}, settled=0)
    return job


async def step(engine: Engine, job: Job) -> None:
    """Update the weight and commit it as the next step."""
    number = job.next_step
    gradient = await engine.pending_steps.allocate_gradient(job, "all")
    engine.gradients.tensor(gradient).fill_(0.25)
    engine.pending_steps.update(job, number, "all", gradient, descend)
    durable = await engine.commit(job, number, {0: b""}, settled=number)
    print(f"step {number} is {'durable' if durable else 'committed'}")


async def first_elements(reader: StepReader) -> list[float]:
    """Return the first three elements of the weight at the step that the reader holds."""
    data = b"".join([piece async for piece in reader.read("weight", Kind.PARAM, 0, 3)])
    return list(array.array("f", data))


async def main(directory: Path) -> None:
    """Commit two more steps than the store in `directory` has, and print them."""
    config = EngineConfig(state_dir=directory, host_budget_bytes=64 * MIB, nvme_budget_bytes=256 * MIB)
    engine = await Engine.open(config)
    try:
        job = await begin(engine)
        await step(engine, job)
        held = await engine.step_readers.open(job)
        await step(engine, job)
        newest = await engine.step_readers.open(job)
        for reader in (held, newest):
            print(f"step {reader.step}: weight = {await first_elements(reader)} ...")
            reader.close()
        print(f"{engine.nvme.used_bytes:,} bytes used of {engine.nvme.detail}")
    finally:
        await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    tune_interpreter()
    uvloop.run(main(parser.parse_args().directory))
