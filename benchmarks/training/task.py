"""What all contestants of a training benchmark have in common: the model's shape, the data's, and the hyper-parameters.

Read by the contestants, too, one of which has an environment of its own: it must need nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ModelKind = Literal["gpt2", "opt_layer_drop", "mixtral", "mixtral_experts"]

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """A model, its batches, and how it is clipped. The rest is the same for all tasks: bf16 with fp32 master weights
    and moments, AdamW, no dropout, no recomputation.

    Attributes:
        hidden: a multiple of 64, the width of a head.
        batch, tokens: sequences of a step, and the length of each.
        clip: limit of the gradient's global norm; 0: none.
    """

    model: ModelKind = "gpt2"
    layers: int
    hidden: int
    vocab: int
    batch: int
    tokens: int
    clip: float = 0.0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.tokens

    @property
    def gpt2_parameters(self) -> int:
        """Elements of a GPT-2 of this shape: embeddings of tokens and positions, blocks, and the last norm."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return (self.vocab + self.tokens + 2) * self.hidden + self.layers * block

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter of a GPT-2 of this shape: the embedding, or a layer of the MLP."""
        return max(self.vocab, 4 * self.hidden) * self.hidden

    def deepspeed_config(self) -> dict[str, Any]:
        """What the task says in a config of DeepSpeed's, which is ours, too."""
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": 3},
        }
