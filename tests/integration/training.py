"""Small training runs for tests: the same model and batches in plain PyTorch, under DDP, and through the store.

Run as a program, it is one rank of a launch: `python -m tests.integration.training RUNS.json RESULTS.pt`, with
torchrun's environment variables.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import trainer_client
from tests.integration.zoo import ZOO

VOCABULARY = 257
MICRO_BATCH = 2
LENGTH = 32
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is trained, and how."""

    model: str = "gpt2"  # "conditional", or a name of the zoo
    checkpointing: Literal["none", "reentrant", "non-reentrant"] = "none"
    steps: int = 30
    dropout: float = 0.0
    clipping: float = 0.0
    accumulation: int = 1
    schedule: bool = False
    two_groups: bool = False
    through_store: bool = True
    prefer_streams: bool = False
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Losses of this rank's micro-batches, norms of the steps, and the final weights by name."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    plane: str = ""


def store_config(state_dir: Path, device: str = "nvme", **section: Any) -> dict[str, Any]:
    """A config with everything on one tier, in a daemon of the job's own."""
    offload = {"device": device, "nvme_path": str(state_dir)} if device == "nvme" else {"device": device}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "paramserver": {
            "state_dir": str(state_dir),
            "host_budget": "128MiB",
            "nvme_budget": "1GiB",
            "durability": "step",
            **section,
        },
    }


class ConditionalBlock(nn.Module):
    """Its experts depend on the data, one parameter is never used, and one is reached by a branch without inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.position = nn.Parameter(torch.randn(width))
        self.never_used = nn.Parameter(torch.ones(5))

    def forward(self, hidden: torch.Tensor, context: torch.Tensor, chosen: int) -> tuple[torch.Tensor]:
        hidden = hidden + torch.relu(self.shared(hidden + context)) + self.shared(self.position)
        return (hidden + self.experts[chosen](hidden),)


@dataclass(frozen=True, slots=True)
class Output:
    """An output whose tensor hooks cannot find: torch's pytrees do not know the class."""

    loss: torch.Tensor


class ConditionalModel(nn.Module):
    """What breaks naive gathering: units that are skipped, used twice, or partly used; frozen and tied weights."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        width = 24
        self.calls = 0
        self.checkpointing = run.checkpointing
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.blocks = nn.ModuleList([ConditionalBlock(width) for _ in range(4)])
        self.blocks[1].shared.weight.requires_grad_(False)
        self.head = nn.Linear(width, VOCABULARY)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.frozen(self.embedding(input_ids)) * self.scale
        context = hidden * 2
        # Which experts: by this rank's data. Which blocks: by the step, for ranks must use units alike.
        chosen = int(input_ids.sum()) % 4
        self.calls += 1
        for index, block in enumerate(self.blocks):
            if (index + self.calls) % 3:
                hidden = self._run(block, hidden, context, (chosen + index) % 4)
        if self.calls % 2:
            hidden = self._run(self.blocks[0], hidden, context, chosen)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return Output(loss)

    def _run(self, block: nn.Module, hidden: torch.Tensor, context: torch.Tensor, chosen: int) -> torch.Tensor:
        if self.checkpointing == "none":
            return block(hidden, context, chosen)[0]
        return checkpoint(block, hidden, context, chosen, use_reentrant=self.checkpointing == "reentrant")[0]


def build_model(run: Run) -> nn.Module:
    torch.manual_seed(1)
    if run.model == "conditional":
        return ConditionalModel(run)
    if run.model in ZOO:
        return ZOO[run.model]().train()
    config = GPT2Config(
        n_layer=3,
        n_embd=64,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        resid_pdrop=run.dropout,
        embd_pdrop=run.dropout,
        attn_pdrop=run.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).train()


def micro_batches(count: int, rank: int = 0, world_size: int = 1) -> Iterator[torch.Tensor]:
    """[MICRO_BATCH, LENGTH] tokens each; a rank gets its own part of a sequence that all share."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        # A narrow range of tokens, so that there is something to learn.
        tokens = torch.randint(0, 40, (world_size * MICRO_BATCH, LENGTH), generator=generator)
        yield tokens[rank * MICRO_BATCH : (rank + 1) * MICRO_BATCH]


def make_optimizer(model: nn.Module, run: Run) -> tuple[AdamW, LRScheduler | None]:
    groups: Any = [p for p in model.parameters() if p.requires_grad]
    if run.two_groups:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
    optimizer = AdamW(groups, lr=1e-2, fused=True)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5) * 0.97**step) if run.schedule else None
    return optimizer, scheduler


def train_plain(run: Run) -> Result:
    """PyTorch without us; under DDP where a process group is initialised."""
    model = build_model(run)
    rank, world_size, forward = 0, 1, model
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        forward = DistributedDataParallel(model, find_unused_parameters=run.model != "gpt2")
    optimizer, scheduler = make_optimizer(model, run)
    losses, norms = [], []
    torch.manual_seed(3 + rank)
    for index, batch in enumerate(micro_batches(run.steps * run.accumulation, rank, world_size), start=1):
        loss = forward(input_ids=batch, labels=batch).loss / run.accumulation
        loss.backward()
        losses.append(loss.item())
        if index % run.accumulation:
            continue
        if run.clipping:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), run.clipping)))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return Result(losses=losses, norms=norms, weights=dict(model.state_dict()))


def train_through_store(run: Run) -> Result:
    model = build_model(run)
    optimizer, scheduler = make_optimizer(model, run)
    config = run.config | {"gradient_accumulation_steps": run.accumulation, "gradient_clipping": run.clipping}
    engine, *_ = trainer_client.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, prefer_streams=run.prefer_streams
    )
    with engine:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        losses, norms = [], []
        torch.manual_seed(3 + rank)
        for tokens in micro_batches(run.steps * run.accumulation, rank, world_size):
            batch = tokens.to(engine.device)
            loss = engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
            losses.append(loss.item())
            norm = engine.get_global_grad_norm()
            if run.clipping and engine.micro_steps % run.accumulation == 0 and norm is not None:
                norms.append(norm)
        return Result(losses=losses, norms=norms, weights=engine.full_state_dict(), plane=engine.data_plane)


def train(run: Run) -> Result:
    return train_through_store(run) if run.through_store else train_plain(run)


def launch(runs: Sequence[Run], world_size: int, directory: Path, timeout_seconds: float = 150.0) -> list[Result]:
    """Makes one run after the other on `world_size` ranks, which are processes of their own; rank 0's results."""
    plan, result = directory / "runs.json", directory / "results.pt"
    plan.write_text(json.dumps([asdict(run) for run in runs]))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.integration.training", str(plan), str(result)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_seconds)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, f"rank {number} ended with {rank.returncode}:\n{output}"
    return [Result(**content) for content in torch.load(result)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def assert_bit_equal(actual: Result, expected: Result) -> None:
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert actual.weights.keys() == expected.weights.keys()
    different = [name for name in actual.weights if not torch.equal(actual.weights[name], expected.weights[name])]
    assert different == []


def main() -> None:
    plan, result = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    results = [train(Run(**content)) for content in json.loads(plan.read_text())]
    if dist.get_rank() == 0:
        torch.save([asdict(trained) for trained in results], result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
