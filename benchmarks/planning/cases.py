"""The eight jobs of the benchmark: stages, homes, precisions and ranks, with GPT-2-like models of 17 to 99 million.

On a processor without instructions for bf16 all of them are in fp32, because the products of a step in bf16 would take
half a minute there, beside which nothing else could be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training.bf16_emulation import need_fp32

VOCABULARY = 8192
STEPS = 24
HOST_BUDGET = "768MiB"
NVME_BUDGET = "4GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job: `homes` are those of parameters and optimizer states, `layers` x `hidden` the model's shape."""

    name: str
    stage: int
    homes: tuple[str, str]
    bf16: bool
    ranks: int
    layers: int
    hidden: int
    batch: int = 2
    tokens: int = 128

    def model(self) -> dict[str, Any]:
        """Return the Hugging Face config of the model."""
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": VOCABULARY,
            "n_positions": self.tokens,
            "n_embd": self.hidden,
            "n_layer": self.layers,
            "n_head": self.hidden // 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def config(self, state_dir: Path) -> dict[str, Any]:
        """Return the training config."""
        parameters, optimizer = self.homes
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "bf16": {"enabled": self.bf16 and not need_fp32()},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage},
            "paramserver": {
                "state_dir": str(state_dir),
                "host_budget": HOST_BUDGET,
                "nvme_budget": NVME_BUDGET,
                "placement": {"parameters": parameters, "optimizer": optimizer},
                "durability": "step",
            },
        }

    def spec(self, directory: Path) -> dict[str, Any]:
        """Return what a measured rank needs to know."""
        return {
            "model": str(directory / "config.json"),
            "config": self.config(directory / "state"),
            "state_dir": str(directory / "state"),
            "batch": self.batch,
            "tokens": self.tokens,
            "steps": STEPS,
            "result": str(directory / "result"),
        }


JOBS = (
    Job(name="stage 0, device, fp32", stage=0, homes=("device", "device"), bf16=False, ranks=1, layers=6, hidden=512),
    Job(name="stage 1, host, bf16", stage=1, homes=("device", "host"), bf16=True, ranks=1, layers=8, hidden=512),
    Job(
        name="stage 1, nvme, fp32, 2 ranks",
        stage=1,
        homes=("device", "nvme"),
        bf16=False,
        ranks=2,
        layers=4,
        hidden=512,
    ),
    Job(
        name="stage 2, host, fp32, 2 ranks",
        stage=2,
        homes=("device", "host"),
        bf16=False,
        ranks=2,
        layers=4,
        hidden=512,
    ),
    Job(name="stage 2, nvme, bf16", stage=2, homes=("device", "nvme"), bf16=True, ranks=1, layers=12, hidden=640),
    Job(name="stage 3, host, fp32", stage=3, homes=("host", "host"), bf16=False, ranks=1, layers=6, hidden=512),
    Job(name="stage 3, nvme, bf16", stage=3, homes=("nvme", "nvme"), bf16=True, ranks=1, layers=13, hidden=768),
    Job(name="stage 3, nvme, bf16, 2 ranks", stage=3, homes=("nvme", "nvme"), bf16=True, ranks=2, layers=6, hidden=640),
)
