"""The section `zero_optimization`: ZeRO's stage, and the offload of parameters and optimizer states."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt

from paramserver.contract.places import Place
from trainer_client.base.section import Agreement, Section
from trainer_client.config.deepspeed_keys import with_rows

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class OffloadSection(Section):
    """The base of the sections that offload parameters or optimizer states to host memory ("cpu") or NVMe."""

    device: Literal["none", "cpu", "nvme"] = Field(default="none", description="`none`, `cpu` or `nvme`")
    # `nvme_path` is not compared between ranks. The ranks compare the state directory that is derived from it: see
    # `TrainingConfig.daemon_values`.
    nvme_path: Annotated[Place | None, Agreement.NONE] = Field(
        default=None,
        description="state directory of the job's own daemon, if the device is `nvme`; both sections have the same",
    )


@with_rows("zero_optimization.offload_param")
class OffloadParamSection(OffloadSection):
    """The section `zero_optimization.offload_param`: where parameters are kept while they are not gathered."""


@with_rows("zero_optimization.offload_optimizer")
class OffloadOptimizerSection(OffloadSection):
    """The section `zero_optimization.offload_optimizer`: where optimizer states are kept between updates.

    The fraction `ratio` of the states is offloaded, and the rest stays on the device.
    """

    ratio: Fraction = Field(default=1.0, description="the part that is offloaded; the rest stays on the device")

    @property
    def pipeline(self) -> bool:
        """Whether one of DeepSpeed's keys asks for reads or writes that run during an update."""
        return any(getattr(self, key) for key in ("pipeline_read", "pipeline_write"))


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[list[str], BeforeValidator(_as_list)]
"""Names, of which a single one may be written without the list."""


class LeafModuleSection(Section):
    """The section that names modules which are gathered as a whole, with all their submodules, at stage 3."""

    classes: Names = Field(
        default=[],
        description="modules of these classes are gathered as a whole at stage 3: they are [units](models.md)",
    )
    names: Names = Field(default=[], description="modules with these names, as in `model.named_modules()`")
    name_suffixes: Names = Field(default=[], description="modules whose names end so")


@with_rows("zero_optimization")
class ZeroSection(Section):
    """The section `zero_optimization`: the stage of DeepSpeed's ZeRO, and what is offloaded.

    Parameters and optimizer states without an offload section, or with the device "none", stay on the trainer's device.
    """

    stage: Literal[0, 1, 2, 3] = Field(default=0, description="0, 1, 2 or 3: [stages](engine.md)")
    offload_param: OffloadParamSection | None = Field(default=None, description="offload of parameters; stage 3")
    offload_optimizer: OffloadOptimizerSection | None = Field(
        default=None, description="offload of optimizer states; stages 1 to 3"
    )
    stage3_max_live_parameters: NonNegativeInt | None = Field(
        default=None,
        description="elements that may stay gathered between two uses; null or 0: "
        "[only what takes no memory](models.md)",
    )
    leaf_module: LeafModuleSection = Field(default=LeafModuleSection(), description="leaf modules")
    stage3_param_persistence_threshold: int = Field(
        default=100_000,
        ge=0,
        description="parameters of up to this many elements may be read outside of a forward, as in "
        "`model.scale.item()`; see [models](models.md#reading-small-parameters)",
    )
    stage3_model_persistence_threshold: int = Field(
        default=2**63 - 1, ge=0, description="most elements of all these parameters together"
    )
    stage3_gather_16bit_weights_on_model_save: bool = Field(
        default=False,
        description="whether the Trainer of transformers and Accelerate write whole weights; `save_16bit_model()` "
        "always does",
    )
    ignore_unused_parameters: bool = Field(
        default=True,
        description="leave a parameter without a gradient as it is; false: at stage 2, `step()` raises an error that "
        "names the parameters that no rank has used",
    )
    enable_sanity_checks: bool = Field(
        default=False,
        description="a change within `GatheredParameters` that no rank keeps is an error; false: a warning",
    )
