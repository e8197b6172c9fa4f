"""The record of torch.optim.AdamW."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat

from trainer_client.optimizers.adam import to_row
from trainer_client.optimizers.torch_optimizer import ArgumentsSection, Beta, OptimizerSection, TorchOptimizer


class AdamWSection(ArgumentsSection):
    """Hyper-parameters of `torch.optim.AdamW`, with its defaults."""

    lr: NonNegativeFloat = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-2
    # With false, DeepSpeed would use kernels of its own. The store's kernels are torch's.
    torch_adam: Literal[True] = True

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of torch's class."""
        return self.model_dump(exclude={"torch_adam"})


class AdamWOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "AdamW"."""

    type: Literal["AdamW"]
    params: AdamWSection = AdamWSection()


ADAMW = TorchOptimizer(torch_class=torch.optim.AdamW, section=AdamWOptimizer, to_row=to_row)
