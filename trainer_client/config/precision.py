"""The keys of number formats: bf16, fp16 and its loss scale, autocast, and the types of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from trainer_client.section import Section
from trainer_client.standing import Refused, WithoutEffect

_NAMES = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}
_SHORT = {name: short for short, names in _NAMES.items() for name in names}


def _short_name(value: Any) -> Any:
    """Return the shortest of the names that DeepSpeed has for a dtype."""
    return _SHORT.get(value.lower(), value) if isinstance(value, str) else value


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


DTypeName = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_short_name)]

# DeepSpeed's default of torch_autocast.lower_precision_safe_modules.
_LINEAR_AND_CONVOLUTIONAL = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")

_NO_LOSS_SCALE = "bf16 has the range of fp32, so there is no loss scale"
_MASTERS_ARE_FP32 = "master weights and optimizer states are fp32; offload the optimizer to take them off the device"


class Bf16Section(Section):
    """Training with parameters in bf16."""

    enabled: bool = Field(default=False, description="compute in bf16 with fp32 master weights")
    immediate_grad_update: Annotated[
        bool,
        WithoutEffect(why="each gradient is added up as soon as the backward pass has made it"),
        Field(description="add gradients up during the backward pass"),
    ] = False
    check_grad_overflow: Annotated[
        bool,
        WithoutEffect(why="a step whose gradient is not finite is always skipped"),
        Field(description="skip a step whose gradient is not finite"),
    ] = True
    bf16_master_weights_and_grads: Annotated[
        bool,
        WithoutEffect(why=_MASTERS_ARE_FP32),
        Field(description="keep master weights and gradients in bf16"),
    ] = False
    bf16_optimizer_states: Annotated[
        bool,
        WithoutEffect(why=_MASTERS_ARE_FP32),
        Field(description="keep optimizer states in bf16"),
    ] = False
    loss_scale: Annotated[
        float, WithoutEffect(why=_NO_LOSS_SCALE), Field(description="written beside bf16, as for fp16")
    ] = 0.0
    initial_scale_power: Annotated[
        int, WithoutEffect(why=_NO_LOSS_SCALE), Field(description="written beside bf16, as for fp16")
    ] = 16
    loss_scale_window: Annotated[
        int, WithoutEffect(why=_NO_LOSS_SCALE), Field(description="written beside bf16, as for fp16")
    ] = 1000
    hysteresis: Annotated[
        int, WithoutEffect(why=_NO_LOSS_SCALE), Field(description="written beside bf16, as for fp16")
    ] = 2
    min_loss_scale: Annotated[
        float, WithoutEffect(why=_NO_LOSS_SCALE), Field(description="written beside bf16, as for fp16")
    ] = 1.0


class Fp16Section(Section):
    """DeepSpeed's loss scaling. A `loss_scale` of 0 chooses dynamic scaling."""

    enabled: bool = Field(default=False, description="compute in fp16 with fp32 master weights")
    auto_cast: Annotated[
        bool,
        WithoutEffect(why="floating-point inputs of the model are always cast to the parameters' dtype"),
        Field(description="cast the model's inputs to fp16"),
    ] = False
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
    opt_level: Annotated[
        str | None,
        WithoutEffect(why="it is a key of apex, which DeepSpeed does not read"),
        Field(description="written beside fp16, as for apex"),
    ] = None
    fp16_master_weights_and_grads: Annotated[
        bool,
        WithoutEffect(why=_MASTERS_ARE_FP32),
        Field(description="keep master weights and gradients in fp16"),
    ] = False

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
    """The forward pass under `torch.autocast`. Parameters keep their dtype, and torch casts them where it computes.

    In fp16 the loss is scaled as torch's GradScaler scales it.
    """

    enabled: bool = Field(default=False, description="run the forward pass under `torch.autocast`")
    dtype: Annotated[Literal["bf16", "fp16"], BeforeValidator(_short_name)] = Field(
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


class DataTypesSection(Section):
    """The types of accumulated data.

    `grad_accum_dtype` is the type of gradients between two micro-batches; null stands for the parameter's type.
    """

    grad_accum_dtype: DTypeName | None = Field(
        default=None,
        description="of gradients between micro-batches: `fp32`, `bf16`, `fp16`; null: the parameter's",
    )
    param_dtype: Annotated[
        DTypeName | None,
        WithoutEffect(why="it can only repeat what bf16 and fp16 say"),
        Field(description="dtype of the parameters; another one than that of `bf16` or `fp16` is an error"),
    ] = None
    buffer_dtype: DTypeName | None = Field(
        default=None,
        description="to which the floating-point buffers of the model are cast: `fp32`, `bf16`, `fp16`; null: each "
        "keeps its own",
    )


class PrecisionKeys(Section):
    """The keys of the config that choose number formats."""

    bf16: Bf16Section = Field(default=Bf16Section(), description="training in bf16")
    fp16: Fp16Section = Field(default=Fp16Section(), description="training in fp16")
    torch_autocast: TorchAutocastSection = Field(
        default=TorchAutocastSection(), description="the forward pass under `torch.autocast`"
    )
    amp: Annotated[
        Mapping[str, Any] | None,
        Refused(
            why="NVIDIA's apex is not supported",
            instead="enable bf16, fp16 or torch_autocast",
        ),
        Field(description="mixed precision by apex; all keys but `enabled` are arguments of apex"),
    ] = None
    data_types: DataTypesSection = Field(default=DataTypesSection(), description="types of accumulated data")
