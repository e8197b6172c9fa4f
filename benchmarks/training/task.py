"""The task that all contestants of a benchmark share: the shapes of model and data, and the hyper-parameters.

This module must need nothing but the standard library, because DeepSpeed's environment imports this module, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
HEAD_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask:
    """A GPT-2, its batches, and the clipping of its gradients.

    All tasks have in common: bf16 with fp32 master weights and moments, AdamW, no dropout.

    Attributes:
        hidden: the width of the model, a multiple of 64, which is the width of a head.
        vocab: the number of tokens in the vocabulary.
        batch: the number of sequences of a step, or of a micro-batch.
        tokens: the length of each sequence.
        clip: the limit of the gradients' global norm; 0: none.
        accumulation: the number of micro-batches of a step, each of `batch` sequences.
        checkpoints: whether blocks are checkpointed: of each one only the input is kept, and its forward runs twice.
    """

    layers: int
    hidden: int
    vocab: int
    batch: int
    tokens: int
    clip: float = 0.0
    accumulation: int = 1
    checkpoints: bool = False

    @property
    def tokens_per_step(self) -> int:
        return self.accumulation * self.batch * self.tokens

    @property
    def gpt2_parameters(self) -> int:
        """The number of elements of the model: embeddings of tokens and positions, blocks, last norm."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return (self.vocab + self.tokens + 2) * self.hidden + self.layers * block

    @property
    def largest_parameter(self) -> int:
        """The number of elements of the largest parameter of the model.

        It is either the embedding of tokens or a layer of the MLP.
        """
        return max(self.vocab, 4 * self.hidden) * self.hidden

    def deepspeed_config(self) -> dict[str, Any]:
        """Return the task's part of a DeepSpeed config, which this project reads, too."""
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": 3},
        }
