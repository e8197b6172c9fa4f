"""Two tasks in one model as a script of DeepSpeed: several losses, an optimizer and a schedule of its own, evaluation.

    torchrun --nproc-per-node 2 -m trainer_client.as_deepspeed examples/deepspeed_multitask.py

Without `-m trainer_client.as_deepspeed`, DeepSpeed itself runs it. A shared trunk finds the class of a sequence, and
the tokens that are hidden in it. The model is built in parts (ZeRO-3), and gathered where its weights are needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

VOCABULARY = 32
LENGTH = 12
CLASSES = 4
WIDTH = 32
HIDDEN_TOKEN = 0

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A mixer over the positions and one over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.positions = nn.Linear(LENGTH, LENGTH)
        self.features = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [samples, LENGTH, WIDTH] for an input of the same shape."""
        mixed = self.positions(self.norm(hidden).transpose(1, 2)).transpose(1, 2)
        result: torch.Tensor = hidden + self.features(hidden + mixed)
        return result


class TwoTasks(nn.Module):
    """A trunk with two heads, one of which uses the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)
        deepspeed.zero.register_external_parameter(self, self.embedding.weight)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the classes' logits [samples, CLASSES] and the tokens' [samples, LENGTH, VOCABULARY]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        return self.classifier(hidden.mean(dim=1)), functional.linear(hidden, self.embedding.weight)


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="two tasks")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output_dir", type=Path, default=Path("multitask"))
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    parser.add_argument("--loss_file", type=Path, help="the losses of each step of all ranks, as JSON")
    return parser.parse_args()


def init_weights(module: nn.Module) -> None:
    """Initialise a module's own parameters on rank 0; the other ranks get its values."""
    own = list(module.parameters(recurse=False))
    with deepspeed.zero.GatheredParameters(own, modifier_rank=0):
        if deepspeed.comm.get_rank() != 0:
            return
        if isinstance(module, nn.Embedding):
            # Neighbouring tokens begin near each other.
            positions = torch.arange(VOCABULARY)[:, None] / VOCABULARY
            module.weight.data.copy_(torch.sin(positions * torch.arange(1, WIDTH + 1)) / 4)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=torch.Generator().manual_seed(module.weight.numel()))
            nn.init.zeros_(module.bias)


def draw(samples: int, seed: int, device: torch.device) -> Batch:
    """Return tokens with some of them hidden [samples, LENGTH], the whole tokens, and classes [samples]."""
    own = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=own)
    first = torch.randint(VOCABULARY - 1, (samples, 1), generator=own)
    whole = 1 + (first + (labels[:, None] + 1) * torch.arange(LENGTH)) % (VOCABULARY - 1)
    shown = torch.where(torch.rand(samples, LENGTH, generator=own) < 0.2, HIDDEN_TOKEN, whole)
    return shown.to(device), whole.to(device), labels.to(device)


def losses_of(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the classes and that of the hidden tokens, both 0-D."""
    shown, whole, labels = batch
    classes, tokens = model(shown)
    hidden = torch.where(shown == HIDDEN_TOKEN, whole, -100)
    return functional.cross_entropy(classes, labels), functional.cross_entropy(tokens.flatten(0, 1), hidden.flatten())


def mean_of_ranks(values: Iterable[torch.Tensor]) -> list[float]:
    """Return the means of 0-D tensors over all ranks."""
    means = torch.stack([value.detach().float() for value in values])
    deepspeed.comm.all_reduce(means)
    return [value / deepspeed.comm.get_world_size() for value in means.tolist()]


def evaluate(engine: Any) -> list[float]:
    """Return both losses on other sequences."""
    engine.module.eval()
    with torch.no_grad():
        batches = [draw(16, 90_000 + number, engine.device) for number in range(2)]
        losses = [torch.stack(losses_of(engine.module, batch)) for batch in batches]
    engine.module.train()
    return mean_of_ranks(torch.stack(losses).mean(dim=0))


def main() -> None:
    """Train on both tasks, evaluate on the way, and save the weights."""
    args = parse_arguments()
    deepspeed.init_distributed()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = TwoTasks()
    model.apply(init_weights)
    vectors = [parameter for name, parameter in model.named_parameters() if name.endswith("bias") or "norm" in name]
    known = {id(parameter) for parameter in vectors}
    matrices = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=lambda given: LambdaLR(given, lambda step: min(1.0, (step + 1) / 10) * 0.99**step),
    )

    rank, losses, rates, evaluations = engine.global_rank, [], [], []
    for step in range(args.steps):
        batch = draw(8, 1000 * step + rank, engine.device)
        class_loss, token_loss = losses_of(engine, batch)
        if step % 2:
            # The loop's own backward pass.
            (class_loss + 0.5 * token_loss).backward()
        else:
            # A forward and a backward pass for each loss: their gradients add up.
            engine.backward(class_loss)
            _, token_loss = losses_of(engine, batch)
            engine.backward(0.5 * token_loss)
        engine.step()
        losses.append(mean_of_ranks([class_loss, token_loss]))
        rates.append([scheduler.get_last_lr()[0], optimizer.param_groups[1]["lr"]])
        if (step + 1) % 10 == 0:
            evaluations.append(evaluate(engine))
            if rank == 0:
                print(f"step {step + 1}: classes {evaluations[-1][0]:.4f}, hidden tokens {evaluations[-1][1]:.4f}")

    engine.save_16bit_model(str(args.output_dir), "weights.bin")
    if rank == 0:
        saved = TwoTasks()
        saved.load_state_dict(torch.load(args.output_dir / "weights.bin", weights_only=True))
        with torch.no_grad():
            final = [float(loss) for loss in losses_of(saved, draw(16, 90_000, torch.device("cpu")))]
        print(f"the saved weights: classes {final[0]:.4f}, hidden tokens {final[1]:.4f}")
        if args.loss_file is not None:
            results = {"losses": losses, "rates": rates, "evaluations": evaluations, "saved": final}
            args.loss_file.write_text(json.dumps(results))
    engine.destroy()


if __name__ == "__main__":
    main()
