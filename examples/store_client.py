"""An embedding table that one program writes to a store daemon while another one searches it.

The writer moves vectors towards each other, and commits the table several times as a new step. The searcher watches for
commits, opens a reader that holds the newest step, and finds nearest neighbours in it while the writer goes on. Run it
with the address of a daemon, or with a directory in which it starts a daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer_client import StoreClient, StoreWriter, TensorSpec

JOB = "embeddings"
ITEMS, WIDTH = 2000, 32
TOPICS = 8
ASKED = 200  # the number of items whose neighbours are searched
STEPS = 5
TENSORS = {
    "vectors": TensorSpec(shape=(ITEMS, WIDTH), dtype=torch.float32),
    # The number of pairs from which the vectors have learned.
    "seen": TensorSpec(shape=(1,), dtype=torch.float32),
}


def learn(vectors: torch.Tensor, generator: torch.Generator, pairs: int = 4000) -> None:
    """Move random pairs of items of the same topic towards each other, in place.

    `vectors` are [ITEMS, WIDTH] in fp32. An item's topic is its number modulo TOPICS.
    """
    first = torch.randint(ITEMS, (pairs,), generator=generator)
    other = torch.randint(ITEMS // TOPICS, (pairs,), generator=generator) * TOPICS + first % TOPICS
    pull = 0.3 * (vectors[other] - vectors[first])
    vectors.index_add_(0, first, pull)
    vectors.copy_(torch.nn.functional.normalize(vectors))


async def write(job: StoreWriter) -> None:
    """Learn and commit STEPS tables, as the steps after the job's last one."""
    generator = torch.Generator().manual_seed(0 if job.step is None else job.step + 1)
    vectors = torch.nn.functional.normalize(torch.randn(ITEMS, WIDTH, generator=generator))
    seen = torch.zeros(1)
    for _ in range(STEPS):
        learn(vectors, generator)
        seen += 4000
        await job.put({"vectors": vectors, "seen": seen})
        step = await job.commit()
        print(f"writer:   step {step} is committed")


async def search(store: StoreClient, last: int) -> None:
    """Search neighbours in each step that the watch reports, up to step `last`."""
    async for commit in store.watch(JOB):
        async with await store.read(JOB) as reader:
            await reader.prefetch(TENSORS)
            vectors, seen = await reader.get("vectors"), await reader.get("seen")
            asked = await reader.get("vectors", offset=0, numel=ASKED * WIDTH)
        nearest = (asked.view(ASKED, WIDTH) @ vectors.T).topk(20).indices
        same = (nearest % TOPICS == torch.arange(ASKED)[:, None] % TOPICS).double().mean()
        print(f"searcher: step {reader.step}, {int(seen)} pairs seen: {same:.0%} of neighbours are of the same topic")
        if max(commit.step, reader.step) >= last:
            return


async def run(address: str) -> None:
    """Write and search at the same time."""
    async with await StoreClient.connect(address) as store:
        way = "shared memory" if store.maps_memory else "streams"
        print(f"connected to {address}, bytes go through {way}")
        async with await store.open(JOB, TENSORS) as job:
            before = -1 if job.step is None else job.step
            writing = asyncio.create_task(write(job))
            while job.step is None:
                await asyncio.sleep(0.01)
            await asyncio.gather(writing, search(store, before + STEPS))
        (tensor,) = await store.list_tensors(JOB, prefix="vectors")
        print(f"stored: {tensor.fqn}, {list(tensor.shape)} of {tensor.dtype}")


@contextmanager
def daemon(state_dir: Path) -> Iterator[str]:
    """Start a daemon with its files in `state_dir`, and yield its address; it ends when its standard input does."""
    command = [sys.executable, "-m", "paramserver", "serve", "--exit-with-stdin", "--state-dir", str(state_dir)]
    process = subprocess.Popen(
        [*command, "--host-budget", "64MiB", "--nvme-budget", "256MiB"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"unix:{state_dir / 'paramserver.sock'}"
    finally:
        process.communicate()


def main() -> None:
    """Run the example with a daemon at the given address, or with its own daemon in the given directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", help="unix:/path/paramserver.sock, host:port, or a directory for a daemon of its own")
    where = parser.parse_args().where
    if ":" in where:
        asyncio.run(run(where))
        return
    with daemon(Path(where).absolute()) as address:
        asyncio.run(run(address))


if __name__ == "__main__":
    main()
