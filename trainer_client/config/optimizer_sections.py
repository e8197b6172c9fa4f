"""The config's `optimizer`: one section per optimizer, with the names and defaults of torch's class.

Where DeepSpeed means something else by a name or a default, it has DeepSpeed's meaning, or must be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, NonNegativeFloat

from trainer_client.config.section import Section
from trainer_client.config.supported_optimizers import HONOURED

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamWSection(Section):
    """Hyper-parameters of `torch.optim.AdamW`, with its defaults."""

    lr: NonNegativeFloat = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: NonNegativeFloat = 1e-8
    weight_decay: NonNegativeFloat = 1e-2
    # DeepSpeed has kernels of its own; the store's are torch's.
    torch_adam: Literal[True] = True

    def arguments(self) -> dict[str, Any]:
        """Of torch's class."""
        return self.model_dump(exclude={"torch_adam"})


class AdamSection(AdamWSection):
    """Hyper-parameters of DeepSpeed's `Adam`, which is AdamW unless `adam_w_mode` is false."""

    weight_decay: NonNegativeFloat = 0.0
    adam_w_mode: bool = True

    def arguments(self) -> dict[str, Any]:
        """Of torch's class."""
        values = self.model_dump(exclude={"torch_adam", "adam_w_mode"})
        return values | {"decoupled_weight_decay": self.adam_w_mode}


class SgdSection(Section):
    """Hyper-parameters of `torch.optim.SGD`, with its defaults."""

    lr: NonNegativeFloat = 1e-3
    momentum: NonNegativeFloat = 0.0
    dampening: float = 0.0
    weight_decay: NonNegativeFloat = 0.0
    nesterov: bool = False

    def arguments(self) -> dict[str, Any]:
        """Of torch's class."""
        return self.model_dump()


class LionSection(Section):
    """Hyper-parameters of Lion. DeepSpeed's defaults are not the paper's: the first two must be written."""

    lr: NonNegativeFloat
    betas: tuple[Beta, Beta]
    weight_decay: NonNegativeFloat = 0.0

    def arguments(self) -> dict[str, Any]:
        """Of `trainer_client.Lion`."""
        return self.model_dump()


class AdagradSection(Section):
    """Hyper-parameters of `torch.optim.Adagrad`, with its defaults."""

    lr: NonNegativeFloat = 1e-2
    lr_decay: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0
    initial_accumulator_value: NonNegativeFloat = 0.0
    eps: NonNegativeFloat = 1e-10

    def arguments(self) -> dict[str, Any]:
        """Of torch's class."""
        return self.model_dump()


class AdamWOptimizer(Section):
    type: Literal["AdamW"]
    params: AdamWSection = AdamWSection()


class AdamOptimizer(Section):
    type: Literal["Adam"]
    params: AdamSection = AdamSection()


class SgdOptimizer(Section):
    type: Literal["SGD"]
    params: SgdSection = SgdSection()


class LionOptimizer(Section):
    type: Literal["Lion"]
    params: LionSection


class AdagradOptimizer(Section):
    type: Literal["Adagrad"]
    params: AdagradSection = AdagradSection()


OptimizerSection: TypeAlias = AdamWOptimizer | AdamOptimizer | SgdOptimizer | LionOptimizer | AdagradOptimizer
# By the value of `type`.
OPTIMIZERS: Mapping[str, type[Section]] = dict(zip(HONOURED, get_args(OptimizerSection), strict=True))
