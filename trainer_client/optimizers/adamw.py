"""torch.optim.AdamW as the store runs it: its section of the config, and its record (see torch_optimizer.py)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from trainer_client.base.standing import WithoutEffect
from trainer_client.optimizers.adam import AdamArgumentsSection, to_row
from trainer_client.optimizers.torch_optimizer import OptimizerSection, TorchOptimizer


class AdamWSection(AdamArgumentsSection):
    """Hyper-parameters of DeepSpeed's `AdamW`."""

    always_decoupled: ClassVar[bool] = True

    adam_w_mode: Annotated[
        bool, WithoutEffect(why="AdamW is decoupled in any case"), Field(description="decoupled weight decay")
    ] = True


class AdamWOptimizer(OptimizerSection):
    """The config's section `optimizer` if its `type` is "AdamW"."""

    type: Literal["AdamW"] = Field(description="the optimizer")
    params: AdamWSection = Field(default=AdamWSection(), description="hyper-parameters")


RECORD = TorchOptimizer(torch_class=torch.optim.AdamW, section=AdamWOptimizer, to_row=to_row)
