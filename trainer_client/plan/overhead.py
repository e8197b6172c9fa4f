"""The time of the library's own code in a step: that of real steps of a small job, less that of a plain pass.

A small job computes next to nothing. So the time of its steps, less that of plain forward and backward passes, is the
time of this library's Python code, of calls to the store, and of the store's answers. It grows with the number of
units. What the daemon and other threads of the rank do meanwhile on other processors is counted in CPU seconds.
This module owns the daemon of the small job, and the directory of its state, which is removed. It must never run while
a job trains on this machine.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paramserver.contract.address import ADDRESS_VARIABLE
from paramserver.contract.durability import REPLICATED
from trainer_client.errors import ConfigError
from trainer_client.initialization import initialize
from trainer_client.plan.machine import Overhead, StepOverhead
from trainer_client.plan.probe import free_port, seconds_of
from trainer_client.plan.real_pass import time_passes
from trainer_client.plan.rehearsal import rehearse
from trainer_client.plan.store_probe import made_if_missing
from trainer_client.run.local_daemon import LOCK_NAME

# The numbers of blocks of the two models that are compared. Each block has twelve parameters, like the blocks of most
# transformers.
_FEW, _MANY = 2, 14
_WIDTH, _TOKENS, _VOCABULARY = 64, 16, 64
# The numbers of first steps, which are not timed because they also make objects that later steps use again, and of
# steps that are timed.
_FIRST_STEPS, _STEPS = 3, 15
# The clock of the CPU time of another process has the number (~pid << 3) | 2 on Linux, as clock_getcpuclockid(3) makes
# it.
_CPU_TIME = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallJob:
    """The small job on one rank.

    Attributes:
        config: the training config without the place of its state.
        dtype: the dtype of the parameters; None: fp32.
        beyond_operations: whether the time of torch's own code is a part of the result, because the plan's computation
            is a sum of operations, and not a real pass.
        directory: the directory of the state; all ranks use the daemon that the first rank starts there.
        threads: number of threads that compute.
        ranks: number of ranks.
        rank: number of this rank.
        port: the port at which the ranks meet.
    """

    config: Mapping[str, Any]
    dtype: torch.dtype | None
    beyond_operations: bool = False
    directory: Path
    threads: int
    ranks: int
    rank: int
    port: int


def probe_overhead(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype | None,
    beyond_operations: bool = False,
    ranks: int,
    threads: int,
    directory: Path,
) -> Overhead:
    """Return the seconds that the library's own code takes on this machine's processors.

    Args:
        config: the config of a small job; see `small_config`.
        dtype: the dtype of the parameters; None: fp32.
        beyond_operations: see `SmallJob`.
        ranks: number of ranks of this node.
        threads: threads of each rank.
        directory: a directory on the device that is to hold the state.

    Raises:
        ConfigError: the directory cannot be written to.
    """
    port = free_port()
    try:
        with made_if_missing(directory), TemporaryDirectory(dir=directory, prefix="plan-small-") as own:
            first = SmallJob(
                config=config,
                dtype=dtype,
                beyond_operations=beyond_operations,
                directory=Path(own),
                threads=threads,
                ranks=ranks,
                rank=0,
                port=port,
            )
            jobs = [replace(first, rank=rank) for rank in range(ranks)]
            with multiprocessing.get_context("spawn").Pool(ranks) as pool:
                measured = pool.map(measure_overhead, jobs, chunksize=1)
    except OSError as error:
        raise ConfigError(
            f"--dir {directory} cannot be probed ({error.strerror}): choose another one, or give --no-probe"
        ) from None
    return max(measured, key=lambda one: one.per_step + one.per_unit * _MANY)


def small_config(*, stage: int, homes: tuple[str, str], dtype: torch.dtype | None, durability: str) -> dict[str, Any]:
    """Return the config of a small job whose steps do the same kinds of work as those of a planned job.

    Args:
        stage: the ZeRO stage.
        homes: the homes of parameters and of optimizer states.
        dtype: the dtype of the parameters; None: fp32.
        durability: the key `paramserver.durability`.
    """
    parameters, optimizer = homes
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "fp16": {"enabled": dtype is torch.float16},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "paramserver": {
            "host_budget": "96MiB",
            "nvme_budget": "256MiB",
            "placement": {"parameters": parameters, "optimizer": optimizer},
            # A small job has no replicas that its commits could wait for. Apart from that, they do what those of "step"
            # do.
            "durability": "step" if durability == REPLICATED else durability,
        },
    }


def measure_overhead(job: SmallJob) -> Overhead:
    """Measure in this process, at the same time as the other ranks do."""
    torch.set_num_threads(job.threads)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # The small job starts a daemon of its own, and its config is refused beside the address of an operator's.
    os.environ.pop(ADDRESS_VARIABLE, None)
    with _met(job):
        few, many = (_measure_steps(job, blocks) for blocks in (_FEW, _MANY))
    per_unit, per_step = _divided(few.rank, many.rank)
    store_per_unit, store_per_step = _divided(few.store, many.store)
    return Overhead(per_unit=per_unit, per_step=per_step, store_per_unit=store_per_unit, store_per_step=store_per_step)


def _divided(few: float, many: float) -> tuple[float, float]:
    """Return the seconds for each unit and those for each step, from the seconds of a step of each of the two models.

    Args:
        few, many: the seconds of a step of the model with _FEW blocks, and of the one with _MANY.
    """
    per_unit = max(0.0, (many - few) / (_MANY - _FEW))
    # The root is a unit, too, so there is one unit more than blocks.
    return per_unit, max(0.0, few - (_FEW + 1) * per_unit)


@contextmanager
def _met(job: SmallJob) -> Iterator[None]:
    """Join this process to the job's process group for the context, as a rank that torchrun has started would."""
    os.environ |= {"LOCAL_RANK": str(job.rank), "LOCAL_WORLD_SIZE": str(job.ranks)}
    address = f"tcp://127.0.0.1:{job.port}"
    dist.init_process_group("gloo", init_method=address, rank=job.rank, world_size=job.ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Small(nn.Module):
    """A model of small transformer blocks, which returns a loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        layer = partial(nn.TransformerEncoderLayer, _WIDTH, 1, _WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(blocks))
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _measure_steps(job: SmallJob, blocks: int) -> StepOverhead:
    """Return the overhead of a step of the model: the rank's median beyond a plain pass, and the store's mean.

    The store's seconds are the CPU seconds of the daemon and of all threads of this process, less the seconds of the
    step. A rank that waits for the daemon takes no CPU time, so nothing is counted twice.
    """
    tokens = torch.zeros(1, _TOKENS, dtype=torch.long)
    if job.beyond_operations:
        rehearsal = rehearse(lambda: _Small(blocks), lambda _: {"tokens": tokens}, job.dtype)
        plain = sum(count * seconds_of(operation, "cpu") for operation, count in rehearsal.operations.items())
    else:
        plain = time_passes(_Small(blocks), {"tokens": tokens}, job.dtype)
    state_dir = job.directory / str(blocks)
    section = job.config["paramserver"] | {"state_dir": str(state_dir)}
    engine, *_ = initialize(model=_Small(blocks), config={**job.config, "paramserver": section})
    with engine:
        daemon = ~int((state_dir / LOCK_NAME).read_text()) << 3 | _CPU_TIME

        def step() -> float:
            began = time.perf_counter()
            engine.backward(engine(tokens))
            engine.step()
            return time.perf_counter() - began

        for _ in range(_FIRST_STEPS):
            step()
        began = time.process_time(), time.clock_gettime(daemon)
        taken = [step() for _ in range(_STEPS)]
        worked = time.process_time() - began[0], time.clock_gettime(daemon) - began[1]
    beside = (sum(worked) - sum(taken)) / _STEPS
    return StepOverhead(rank=statistics.median(taken) - plain, store=max(0.0, beside))
