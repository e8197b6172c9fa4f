"""The storage engine by itself: no daemon, no gRPC, no model. Run it with a directory on your NVMe disk.

Two steps of a rule that has nothing to do with training, a reader that holds the first one, and a look at the tiers.
"""

from __future__ import annotations

import argparse
import array
from pathlib import Path

import uvloop

from storage.config import EngineConfig
from storage.engine import Engine
from storage.reader import StepReader
from storage.shard import DType, Durability, GroupSpec, JobSpec, Kind, ParameterSpec, Shard, SlabSpec, TierName
from storage.transform import Tile
from storage.tune_interpreter import tune_interpreter
from storage.versions import Job

NUMEL = 1 << 20
MIB = 1 << 20

WEIGHT = ParameterSpec(fqn="weight", shape=(NUMEL,), dtype=DType.FLOAT32, trainable=True)
# One shard with two kinds of bytes on NVMe; gradients pass through host memory.
GROUP = GroupSpec(
    name="all",
    numel=NUMEL,
    shards=(Shard(fqn="weight", offset=0, numel=NUMEL, position=0),),
    slabs=(
        SlabSpec(kind=Kind.PARAM, dtype=DType.FLOAT32, placement=TierName.NVME),
        SlabSpec(kind=Kind.EXP_AVG, dtype=DType.FLOAT32, placement=TierName.NVME),
        SlabSpec(kind=Kind.GRAD, dtype=DType.FLOAT32, placement=TierName.HOST),
    ),
)
# Every step survives kill -9 and power loss.
JOB = JobSpec(name="example", world_size=1, local_ranks=1, parameters=(WEIGHT,), durability=Durability(every_steps=1))


def descend(tile: Tile) -> None:
    """Gradient descent with momentum, on one piece of the shard at a time; runs on a thread of the engine."""
    momentum = tile.tensors[Kind.EXP_AVG].mul_(0.5).add_(tile.gradient)
    tile.tensors[Kind.PARAM].sub_(momentum)


async def begin(engine: Engine) -> Job:
    """The job at its last committed step, or at step 0 with its initial values."""
    job = await engine.open_job(JOB, may_exist=True, must_exist=False)
    await engine.register(job, [GROUP])
    if job.newest is None:
        pin = await engine.stage(job, "all", Kind.PARAM)
        engine.host.tensor(pin.region, DType.FLOAT32, NUMEL).fill_(1.0)
        await engine.publish(pin)
        await engine.commit(job, 0, {0: b"whatever the client wants to find again"}, settled=0)
    return job


async def step(engine: Engine, job: Job) -> None:
    """One more committed step."""
    number = job.next_step
    gradient = await engine.allocate_gradient(job, "all")
    engine.host.tensor(gradient, DType.FLOAT32, NUMEL).fill_(0.25)
    engine.update(job, number, "all", gradient, descend)
    durable = await engine.commit(job, number, {0: b""}, settled=number)
    print(f"step {number} is {'durable' if durable else 'committed'}")


async def first_elements(reader: StepReader) -> list[float]:
    """Of the weight, at the step that the reader holds."""
    data = b"".join([piece async for piece in reader.read("weight", Kind.PARAM, 0, 3)])
    return list(array.array("f", data))


async def main(directory: Path) -> None:
    """Trains two steps more than the directory has."""
    config = EngineConfig(state_dir=directory, host_budget_bytes=64 * MIB, nvme_budget_bytes=256 * MIB)
    engine = await Engine.open(config)
    try:
        job = await begin(engine)
        await step(engine, job)
        held = await engine.open_reader(job)
        await step(engine, job)
        newest = await engine.open_reader(job)
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
