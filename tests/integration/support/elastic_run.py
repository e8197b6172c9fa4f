"""Parts of training runs whose number of ranks changes from part to part; one launch runs one part of several jobs.

As a program, it is one rank: `python -m tests.integration.support.elastic_run PARTS.json RESULTS.pt`, with torchrun's
environment variables. Rank 0 writes the results.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import trainer_client
from paramserver.v1 import parameter_store_pb2 as pb
from paramserver.v1 import store_admin_pb2 as admin_pb
from tests.integration.support.daemon import admin_of
from tests.integration.support.ranks import run_ranks
from tests.integration.support.training import LENGTH, Run, build_model, make_optimizer
from trainer_client import StoreClientSync, StoredTensor, TrainingLoader

SAMPLES = 60
BATCH = 12
RUN = Run(clipping=0.5, schedule=True)
# The exit code of a killed rank, in the form of Popen.
KILLED = -signal.SIGKILL


class Tokens(Dataset[torch.Tensor]):
    """A data set of `samples` samples of [LENGTH] tokens."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(2)
        # The tokens are from a narrow range, so that there is something to learn.
        self._tokens = torch.randint(0, 40, (samples, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tokens[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a job: from its newest step to the end of global step `until`.

    Attributes:
        addresses: the addresses of the stores; rank r uses number r modulo their number.
        peers: the addresses of the other stores, from which the ranks read an older layout.
        directories: rank r works in number r, so an address in /proc/self/cwd is that of another store on each rank.
        die: kill rank 0 as soon as its store has more bytes of the job than before it began.
    """

    job: str
    until: int
    addresses: tuple[str, ...]
    peers: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    die: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """The result of a part.

    Attributes:
        resumed_step: the step from which it went on.
        epochs: the epoch of each step.
        losses: the mean loss over the global batch of each step.
        before, after: every tensor of every kind, by "FQN/kind", before the first step and after the last.
    """

    resumed_step: int
    epochs: list[int]
    losses: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def config_of(part: Part, rank: int) -> dict[str, Any]:
    section = {
        "address": part.addresses[rank % len(part.addresses)],
        "job": part.job,
        "peers": list(part.peers),
        "data": {"seed": 5},
    }
    offload = {"device": "nvme"}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    return {"train_batch_size": BATCH, "gradient_clipping": RUN.clipping, "zero_optimization": zero} | {
        **part.config,
        "paramserver": section | part.config.get("paramserver", {}),
    }


def train_part(part: Part, run: Run = RUN, frozen: str | None = None) -> PartResult:
    rank = dist.get_rank() if dist.is_initialized() else 0
    if part.directories:
        os.chdir(part.directories[rank])
    model = build_model(run)
    if frozen is not None:
        model.get_parameter(frozen).requires_grad_(False)
    optimizer, scheduler = make_optimizer(model, run)
    config = config_of(part, rank)
    if part.die and rank == 0:
        _die_when_it_grows(config["paramserver"]["address"], part.job)
    engine, _, loader, _ = trainer_client.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, training_data=Tokens(), config=config
    )
    assert isinstance(loader, TrainingLoader)
    losses, epochs = [], []
    with engine:
        before = snapshot(part)
        resumed_step = engine.global_steps
        while engine.global_steps < part.until:
            epoch = loader.epoch
            for batch in loader:
                loss = engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()
                losses.append(mean_over_ranks(loss.detach()))
                epochs.append(epoch)
                if engine.global_steps == part.until:
                    break
        engine.wait_for_commit()
        after = snapshot(part)
    return PartResult(resumed_step=resumed_step, epochs=epochs, losses=losses, before=before, after=after)


def mean_over_ranks(loss: torch.Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def snapshot(part: Part) -> dict[str, torch.Tensor]:
    """Return every tensor of every kind of the job's newest step, read from all stores of the part. Rank 0 only."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world_size > 1:
        dist.barrier()
    tensors = read_job(part.job, part.addresses[:world_size]) if rank == 0 else {}
    if world_size > 1:
        dist.barrier()
    return tensors


def read_job(job: str, addresses: Iterable[str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with ExitStack() as clients:
        for address in dict.fromkeys(addresses):
            client = clients.enter_context(StoreClientSync.connect(address))
            reader = clients.enter_context(client.read(job))
            stored = reader.tensors()
            for kind in dict.fromkeys(kind for tensor in stored for kind in tensor.kinds):
                having = [tensor for tensor in stored if kind in tensor.kinds]
                # One request reads all tensors of which the store has every element.
                whole = reader.get_many([tensor.fqn for tensor in having if is_whole(tensor)], kind=kind)
                tensors |= {f"{fqn}/{kind}": values.flatten() for fqn, values in whole.items()}
                for tensor in having:
                    if is_whole(tensor):
                        continue
                    unread = torch.full((tensor.numel,), torch.nan, dtype=tensor.kinds[kind])
                    parts = tensors.setdefault(f"{tensor.fqn}/{kind}", unread)
                    for offset, numel in tensor.held:
                        parts[offset : offset + numel] = reader.get(tensor.fqn, kind=kind, offset=offset, numel=numel)
    return tensors


def is_whole(tensor: StoredTensor) -> bool:
    """Return whether the store has every element of a tensor."""
    return sum(numel for _, numel in tensor.held) == tensor.numel


def job_info(address: str, job: str) -> admin_pb.JobInfo:
    with admin_of(address) as admin:
        (info,) = (info for info in admin.ListJobs(admin_pb.ListJobsRequest(), timeout=10).jobs if info.name == job)
    return info


def job_bytes(address: str, job: str) -> int:
    return sum(tier.bytes for tier in job_info(address, job).bytes if tier.tier == pb.TIER_NVME)


def job_sessions(address: str, job: str) -> int:
    return job_info(address, job).sessions


def _die_when_it_grows(address: str, job: str) -> None:
    before = job_bytes(address, job)

    def watch() -> None:
        while job_bytes(address, job) <= before:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def launch(parts: Sequence[Part], world_size: int, directory: Path, exit_code: int = 0) -> list[PartResult]:
    """Run the parts on `world_size` processes, which must all end with `exit_code`; return rank 0's results."""
    plan, result = directory / "parts.json", directory / "results.pt"
    plan.write_text(json.dumps([asdict(part) for part in parts]))
    result.unlink(missing_ok=True)
    run_ranks("tests.integration.support.elastic_run", world_size, plan, result, exit_code=exit_code)
    return [PartResult(**content) for content in torch.load(result)] if result.exists() else []


def main() -> None:
    plan, result = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    results = [train_part(Part(**content)) for content in json.loads(plan.read_text())]
    if dist.get_rank() == 0:
        torch.save([asdict(trained) for trained in results], result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
