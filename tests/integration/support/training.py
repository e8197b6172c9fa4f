"""Small training runs for tests: the same model and batches in plain PyTorch, under DDP, and through the store.

As a program, it is one rank of a launch: `python -m tests.integration.support.training RUNS.json RESULTS.pt`, with
torchrun's environment variables.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import trainer_client
from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.ranks import END_SECONDS, run_ranks
from tests.integration.support.zoo import ZOO

VOCABULARY = 257
MICRO_BATCH = 2
LENGTH = 32
FP16_LOSS_SCALE = 256.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The parameters of a training run."""

    # "gpt2", "conditional", "adapters", or a name of the zoo.
    model: str = "gpt2"
    # The number of layers of "gpt2".
    layers: int = 3
    checkpointing: Literal["none", "reentrant", "non-reentrant"] = "none"
    steps: int = 30
    dropout: float = 0.0
    clipping: float = 0.0
    clipping_value: float | None = None
    # The model "adapters" ignores this, because it has mixed dtypes.
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    # The dtype in which gradients are added up over ranks and over micro-batches; None if it is the gradients' own.
    sums_dtype: Literal["fp32"] | None = None
    schedule_of_reduction: Literal["micro_batch", "boundary", "no_sync"] = "micro_batch"
    accumulation: int = 1
    # The index of a step in which the loss of the last rank is NaN.
    poisoned_step: int | None = None
    schedule: bool = False
    two_groups: bool = False
    # The verbs of the loop through the store: DeepSpeed's, or those of a loop that was written for torch.
    loop: Literal["deepspeed", "torch"] = "deepspeed"
    through_store: bool = True
    # The reference is train_with_masters if this is true, else train_plain.
    with_masters: bool = False
    prefer_streams: bool = False
    # A pause after each step, in which other processes have the processors: a follower starts much faster beside it.
    pause_seconds: float = 0.0
    # The device to which the model is moved before it trains, as "cuda:0"; where it is built if this is empty.
    device: str = ""
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of a run.

    Attributes:
        losses: the loss of each of this rank's micro-batches.
        norms: the norm of each step's gradient, if it is clipped.
        weights: the final weights by name.
        moments: the optimizer's final states by "FQN/state", for runs that compare them.
        boundaries: the bytes of boundaries of checkpoints by where they were in the last step.
        tiles: the number of tiles of layers.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    plane: str = ""
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    skipped: int = 0
    resumed_step: int = 0
    placement: dict[str, dict[str, int]] = field(default_factory=dict)
    boundaries: dict[str, int] = field(default_factory=dict)
    tiles: int = 0


def store_config(state_dir: Path, device: str = "nvme", **section: Any) -> dict[str, Any]:
    """Return a config with all states on one tier, and with a daemon that the job itself starts."""
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
    """A block whose experts depend on the data. It never uses one parameter, and one branch depends on no input."""

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
    """An output in which hooks cannot find the tensor, because torch's pytrees do not know the class."""

    loss: torch.Tensor


class ConditionalModel(nn.Module):
    """A model that is hard to gather: units are skipped, used twice or partly used; weights are frozen or tied."""

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
        # The experts depend on this rank's data. The blocks depend on the step, because ranks must use the same units.
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


class AdapterBlock(nn.Module):
    """A frozen bf16 layer with a trainable bf16 bias, and a trainable fp32 adapter of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16)
        self.base.weight.requires_grad_(False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.up(self.down(hidden.float())).to(hidden.dtype)
        return hidden + torch.relu(self.base(hidden)) + adapted


class AdapterModel(nn.Module):
    """A model with parameters of mixed dtypes, as with LoRA: fp32 adapters on a base in bf16."""

    def __init__(self) -> None:
        super().__init__()
        width = 24
        self.embedding = nn.Embedding(VOCABULARY, width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList([AdapterBlock(width) for _ in range(4)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden.float())
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def build_model(run: Run) -> nn.Module:
    """Return the run's model with its first weights, which are drawn on the CPU whatever the run's device is."""
    torch.manual_seed(1)
    model = _model_of(run)
    return model.to(run.device) if run.device else model


def _model_of(run: Run) -> nn.Module:
    if run.model == "adapters":
        return AdapterModel()
    if run.model == "conditional":
        return ConditionalModel(run)
    if run.model in ZOO:
        return ZOO[run.model]().train()
    config = GPT2Config(
        n_layer=run.layers,
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
    model = GPT2LMHeadModel(config).train()
    if run.checkpointing != "none":
        model.activation_checkpointing_enable({"use_reentrant": run.checkpointing == "reentrant"})
    return model


def micro_batches(count: int, rank: int = 0, world_size: int = 1) -> Iterator[torch.Tensor]:
    """Yield a rank's micro-batches, [MICRO_BATCH, LENGTH] tokens each; all ranks cut theirs from the same batches."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        # The tokens are from a narrow range, so that there is something to learn.
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
    """Train with PyTorch alone; under DDP if a process group is initialised."""
    model = build_model(run)
    rank, world_size, forward = 0, 1, model
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        forward = DistributedDataParallel(model, find_unused_parameters=run.model != "gpt2")
    optimizer, scheduler = make_optimizer(model, run)
    losses, norms = [], []
    torch.manual_seed(3 + rank)
    for index, tokens in enumerate(micro_batches(run.steps * run.accumulation, rank, world_size), start=1):
        batch = tokens.to(run.device or "cpu")
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
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    return Result(losses=losses, norms=norms, weights=weights)


def train_with_masters(run: Run) -> Result:
    """Train with PyTorch alone, with fp32 master weights for parameters of low precision, as a hand-written loop does.

    In fp32 it runs under DDP if a process group is initialised. In low precision it sums gradients over ranks itself.
    """
    model = build_model(run)
    low_precision = run.precision != "fp32" or run.model == "adapters"
    if run.precision != "fp32":
        model.to(DTYPES[run.precision])
    rank, world_size, forward = 0, 1, model
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        forward = model if low_precision else DistributedDataParallel(model)
    initial = build_model(run).state_dict()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(initial[name].float()) for name in trained}
    optimizer = AdamW(masters.values(), lr=1e-2, fused=True)
    scale = FP16_LOSS_SCALE if run.precision == "fp16" else 1.0
    losses, norms, skipped = [], [], 0
    sums: dict[str, torch.Tensor] = {}
    torch.manual_seed(3 + rank)
    for index, tokens in enumerate(micro_batches(run.steps * run.accumulation, rank, world_size), start=1):
        batch = tokens.to(run.device or "cpu")
        ends = index % run.accumulation == 0
        reduces = run.schedule_of_reduction == "micro_batch" or ends
        with nullcontext() if reduces or not isinstance(forward, DistributedDataParallel) else forward.no_sync():
            loss = forward(input_ids=batch, labels=batch).loss / run.accumulation
            (poisoned(loss, run, index, rank, world_size).float() * scale).backward()
        losses.append(loss.item())
        if low_precision and reduces:
            for name, parameter in trained.items():
                assert parameter.grad is not None
                gradient, parameter.grad = parameter.grad, None
                gradient = (gradient.float() if run.sums_dtype else gradient).div(world_size)
                if world_size > 1:
                    dist.all_reduce(gradient)
                sums[name] = sums[name] + gradient if name in sums else gradient
        if not ends:
            continue
        for name, master in masters.items():
            gradient = cast(torch.Tensor, sums.pop(name) if low_precision else trained[name].grad)
            master.grad, trained[name].grad = gradient.float() / scale, None
        norm = nn.utils.get_total_norm([master.grad for master in masters.values() if master.grad is not None])
        if not norm.isfinite():
            skipped += 1
            continue
        if run.clipping:
            norms.append(float(nn.utils.clip_grad_norm_(masters.values(), run.clipping)))
        if run.clipping_value is not None:
            nn.utils.clip_grad_value_(masters.values(), run.clipping_value)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(masters[name])
    moments = {
        f"{name}/{kind}": optimizer.state[master][kind].cpu()
        for name, master in masters.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    named = {id(parameter): masters[name].detach() for name, parameter in trained.items()}
    weights = {name: named.get(id(t), t).detach().float().cpu() for name, t in model.state_dict(keep_vars=True).items()}
    return Result(losses=losses, norms=norms, weights=weights, moments=moments, skipped=skipped)


def poisoned(loss: torch.Tensor, run: Run, micro_batch: int, rank: int, world_size: int) -> torch.Tensor:
    """Return the loss; or NaN, if the micro-batch (counted from 1) is in the poisoned step of the last rank."""
    step = (micro_batch - 1) // run.accumulation
    return loss * torch.nan if step == run.poisoned_step and rank == world_size - 1 else loss


def engine_config(run: Run) -> dict[str, Any]:
    """Return a run's config: `run.config`, and the keys for its other fields."""
    config = run.config | {"gradient_accumulation_steps": run.accumulation, "gradient_clipping": run.clipping}
    section = dict(config["paramserver"])
    if run.clipping_value is not None:
        section["gradient_clipping_value"] = run.clipping_value
    if run.accumulation > 1 and run.schedule_of_reduction != "no_sync":
        section["gradient_reduction"] = run.schedule_of_reduction
    if run.precision == "bf16":
        config["bf16"] = {"enabled": True}
    if run.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": FP16_LOSS_SCALE}
    if run.sums_dtype:
        config |= {"data_types": {"grad_accum_dtype": run.sums_dtype}, "communication_data_type": run.sums_dtype}
    return config | {"paramserver": section}


def moments_of(engine: trainer_client.Engine) -> dict[str, torch.Tensor]:
    """Return the optimizer's states by "FQN/state", gathered from all ranks. This is a collective."""
    moments = {}
    for state in engine._loop.parts.states:
        group = state.group
        for kind in group.state_kinds:
            whole = torch.empty(group.slot_table.numel, device=engine.device)
            engine._collectives.all_gather_flat(whole, state.read(kind))
            name = pb.Kind.Name(kind).removeprefix("KIND_").lower()
            for parameter, piece in zip(group.parameters, group.pieces(whole), strict=True):
                moments[f"{parameter.fqn}/{name}"] = piece.cpu().clone()
    return moments


def train_through_store(run: Run) -> Result:
    model = build_model(run)
    optimizer, scheduler = make_optimizer(model, run)
    config = engine_config(run)
    engine, *_ = trainer_client.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, prefer_streams=run.prefer_streams
    )
    with engine:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        losses, norms = [], []
        if not engine.resumed_step:
            torch.manual_seed(3 + rank)
        for index, tokens in enumerate(micro_batches(run.steps * run.accumulation, rank, world_size), start=1):
            if index <= engine.resumed_step * run.accumulation:
                continue
            batch = tokens.to(engine.device)
            boundary, skipped = engine.is_gradient_accumulation_boundary(), engine.skipped_steps
            with engine.no_sync() if run.schedule_of_reduction == "no_sync" and not boundary else nullcontext():
                loss = engine(input_ids=batch, labels=batch).loss
                scaled = poisoned(loss, run, index, rank, world_size)
                if run.loop == "torch":
                    engine.scale(scaled).backward()
                else:
                    engine.backward(scaled)
            if run.loop == "torch":
                engine.optimizer.step()
                engine.optimizer.zero_grad()
            else:
                engine.step()
            time.sleep(run.pause_seconds)
            losses.append((loss / run.accumulation).item())
            norm = engine.get_global_grad_norm()
            is_made = engine.micro_steps % run.accumulation == 0 and engine.skipped_steps == skipped
            if run.clipping and is_made and norm is not None:
                norms.append(norm)
        report = engine.step_report()
        return Result(
            losses=losses,
            norms=norms,
            weights=engine.full_state_dict(),
            boundaries={} if report is None else dict(report.boundaries),
            tiles=sum(p.tile_of is not None for state in engine._loop.parts.states for p in state.group.parameters),
            plane=engine.data_plane,
            moments=moments_of(engine) if run.with_masters else {},
            skipped=engine.skipped_steps,
            resumed_step=engine.resumed_step,
            placement=engine.placement(),
        )


def train(run: Run) -> Result:
    if run.through_store:
        return train_through_store(run)
    return train_with_masters(run) if run.with_masters else train_plain(run)


def launch(runs: Sequence[Run], world_size: int, directory: Path, timeout_seconds: float = END_SECONDS) -> list[Result]:
    """Run one run after the other on `world_size` rank processes, and return rank 0's results."""
    plan, result = directory / "runs.json", directory / "results.pt"
    plan.write_text(json.dumps([asdict(run) for run in runs]))
    run_ranks("tests.integration.support.training", world_size, plan, result, timeout_seconds=timeout_seconds)
    return [Result(**content) for content in torch.load(result)]


def assert_bit_equal(actual: Result, expected: Result) -> None:
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    assert actual.skipped == expected.skipped
    assert actual.weights.keys() == expected.weights.keys()
    different = [name for name in actual.weights if not torch.equal(actual.weights[name], expected.weights[name])]
    if actual.moments and expected.moments:
        assert actual.moments.keys() == expected.moments.keys()
        different += [key for key, moment in actual.moments.items() if not torch.equal(moment, expected.moments[key])]
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
