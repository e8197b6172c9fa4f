"""The sections of number formats: bf16, fp16 and its loss scale, autocast, and the types of gradients."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from trainer_client.base.section import Section
from trainer_client.config.deepspeed_keys import with_rows
from trainer_client.config.dtype_names import DTypeName, short_name


def _finite(value: Any) -> Any:
    """Return a number as it is. Raise ValueError for anything else, and for a number that is not finite.

    Without this, pydantic would take `true` for 1, and a loss scale that is not finite would skip every step.
    """
    if isinstance(value, bool):
        raise ValueError("it must be a number, not true or false")
    try:
        is_finite = math.isfinite(float(value))
    except (TypeError, ValueError):
        raise ValueError("it must be a number") from None
    if not is_finite:
        raise ValueError("it must be a number that is finite")
    return value


# The default of the key torch_autocast.lower_precision_safe_modules in DeepSpeed: the modules that autocast computes in
# the lower precision.
_LINEAR_AND_CONVOLUTIONAL = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")


@with_rows("bf16")
class Bf16Section(Section):
    """The section `bf16`: whether the model's parameters and gradients are in bf16, with fp32 master weights."""

    enabled: bool = Field(default=False, description="compute in bf16 with fp32 master weights")


@with_rows("fp16")
class Fp16Section(Section):
    """The section `fp16`: training in fp16 with DeepSpeed's loss scaling. A `loss_scale` of 0 chooses a dynamic one."""

    enabled: bool = Field(default=False, description="compute in fp16 with fp32 master weights")
    loss_scale: Annotated[NonNegativeFloat, BeforeValidator(_finite)] = Field(default=0.0, description="0: dynamic")
    initial_scale_power: Annotated[int, Field(ge=0, le=32)] = Field(
        default=16, description="dynamic loss scale starts at 2 to this power"
    )
    loss_scale_window: Annotated[int, BeforeValidator(_finite)] = Field(
        default=1000, description="finite steps until it doubles, after the first one, which does not count"
    )
    hysteresis: PositiveInt = Field(default=2, description="overflows until it halves")
    consecutive_hysteresis: bool = Field(
        default=False, description="count only overflows in a row; false: count them until the scale doubles"
    )
    min_loss_scale: Annotated[float, BeforeValidator(_finite)] = Field(
        default=1.0, description="its lower limit; 0: none"
    )

    @model_validator(mode="after")
    def _check_dynamic_scale(self) -> Self:
        """Check the keys that only a dynamic loss scale uses.

        With a static one, DeepSpeed accepts any value of these keys.
        """
        if self.enabled and self.loss_scale == 0:
            if self.loss_scale_window < 1:
                raise ValueError("loss_scale_window must be at least 1 step, because the loss scale is dynamic")
            if self.min_loss_scale < 0:
                raise ValueError("min_loss_scale must not be negative, because the loss scale is dynamic")
        return self


class TorchAutocastSection(Section):
    """The section `torch_autocast`: the forward runs under `torch.autocast`, and parameters keep their dtype.

    In fp16 the loss is scaled as torch's GradScaler scales it.
    """

    enabled: bool = Field(default=False, description="run the forward pass under `torch.autocast`")
    dtype: Annotated[Literal["bf16", "fp16"], BeforeValidator(short_name)] = Field(
        default="bf16", description="autocast's dtype: `bf16`, or `fp16` with a dynamic loss scale"
    )
    lower_precision_safe_modules: tuple[str, ...] | None = Field(
        default=None,
        description="classes of modules whose gradients are added over the ranks in that dtype; `[]`: none; null: "
        "`torch.nn.Linear`, `Conv1d`, `Conv2d` and `Conv3d`",
    )

    @property
    def reduced_classes(self) -> tuple[str, ...]:
        """The names of the classes of modules whose gradients are added over the ranks in autocast's dtype."""
        chosen = self.lower_precision_safe_modules
        return _LINEAR_AND_CONVOLUTIONAL if chosen is None else chosen


@with_rows("data_types")
class DataTypesSection(Section):
    """The section `data_types`: the dtype in which gradients are added up, and that of the model's buffers.

    `grad_accum_dtype` is the type of gradients between two micro-batches; null stands for the parameter's type.
    """

    grad_accum_dtype: DTypeName | None = Field(
        default=None,
        description="of gradients between micro-batches: `fp32`, `bf16`, `fp16`; null: the parameter's",
    )
    buffer_dtype: DTypeName | None = Field(
        default=None,
        description="to which the floating-point buffers of the model are cast: `fp32`, `bf16`, `fp16`; null: each "
        "keeps its own",
    )
