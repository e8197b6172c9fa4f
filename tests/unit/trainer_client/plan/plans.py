"""Small models and configs for the tests of `paramserver plan`, and the plans of them that the command makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner, Result

from paramserver.device_reads import find_hits
from paramserver.store_need import find_need
from trainer_client.plan.cli import app

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 300,
    "n_positions": 32,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MACHINE = (
    "--no-probe --device cuda --hbm 8GiB --host-memory 16GiB --nvme-capacity 64GiB --nvme-read 4GB --nvme-write 2GB"
)
LINKS = "--device-link 20GB --flops 1e13"
TWO_RANKS = "--nproc-per-node 2 --collective 10GB"
# The bytes in fp32 of a block of Wide, and of all its blocks.
BLOCK_BYTES = 8 << 20
WIDE_BYTES = 12 * BLOCK_BYTES


def plan(tmp_path: Path, options: str, config: dict[str, Any] | None = None, model: str | None = None) -> Result:
    """Run the command.

    Args:
        tmp_path: the directory to which the files are written that the command reads.
        options: its options, with spaces between them.
        config: the training config, if one is given.
        model: the name of a class or function of this module, whose inputs are `rows`; None: a GPT-2 in a directory.
    """
    if model is None:
        (tmp_path / "config.json").write_text(json.dumps(GPT2))
        arguments = [str(tmp_path)]
    else:
        arguments = [f"{__name__}:{model}", "--inputs", f"{__name__}:rows"]
    if config is not None:
        (tmp_path / "training.json").write_text(json.dumps(config))
        arguments += ["--config", str(tmp_path / "training.json")]
    return run(*arguments, *options.split())


def run(*arguments: str) -> Result:
    """Run the command with these arguments."""
    return CliRunner().invoke(app, arguments, obj=(find_need, find_hits), catch_exceptions=False)


def planned_of(
    tmp_path: Path,
    model: str | None,
    options: str = "",
    config: dict[str, Any] | None = None,
    *,
    machine: str = f"{MACHINE} {LINKS}",
) -> dict[str, Any]:
    """Return the plan of a config as it is, which may fit or not, with 16 tokens in a sample unless `options` say else.

    See `plan` for the arguments. `machine` has the options that say what there is.
    """
    result = plan(tmp_path, f"{machine} --no-search --json --tokens 16 {options}", config, model)
    assert result.exit_code in (0, 3), result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def line(found: dict[str, Any], what: str) -> int:
    """Return the bytes of a line of a rank's memory; 0 if there is no such line."""
    return sum(one["nbytes"] for one in found["rank"]["lines"] if one["what"] == what)


def wide(stage: int, homes: tuple[Any, Any], micro_batches: int = 1, **section: Any) -> dict[str, Any]:
    """Return a config for a Wide in fp32."""
    placement = {"parameters": homes[0], "optimizer": homes[1]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "paramserver": {"placement": placement, "nvme_budget": "4GiB", **section},
    }


def rows(samples: int, tokens: int) -> dict[str, torch.Tensor]:
    return {"hidden": torch.zeros(samples * tokens, 256)}


class Wide(nn.Module):
    """Blocks of 8 MiB in fp32 each."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(256, 4096, bias=False), nn.Linear(4096, 256, bias=False)) for _ in range(12)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.square().mean()


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Wide()


class Checkpointed(nn.Module):
    """Blocks of which each is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(256, 256) for _ in range(12)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 1.0
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()


class Adapted(nn.Module):
    """A block of frozen weights with a small adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.frozen(hidden) + self.adapter(hidden)


class Adapters(nn.Module):
    """Blocks with adapters, of which the first two are frozen as a whole."""

    def __init__(self, blocks: int = 6, frozen: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted() for _ in range(blocks)])
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


class Headed(nn.Module):
    """Frozen blocks between an embedding and a head, of which one is trained."""

    def __init__(self, *, trains_head: bool) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(6)])
        self.head = nn.Linear(256, 256, bias=False)
        for part in (self.blocks, self.first if trains_head else self.head):
            part.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


def head_trained() -> nn.Module:
    return Headed(trains_head=True)


def first_trained() -> nn.Module:
    return Headed(trains_head=False)
