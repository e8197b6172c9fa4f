"""The training config: DeepSpeed's config, and the section `paramserver`.

This module owns the class of the whole config, and the values that follow from several keys. The keys are defined in
the modules of their topics. Each is honoured with DeepSpeed's meaning unless a mark of base/standing.py says otherwise.
This module must never read the environment on its own: functions that depend on the environment take it as an argument.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeFloat, PositiveInt, PrivateAttr

from paramserver.contract.address import ADDRESS_VARIABLE
from trainer_client.base.section import Agreement
from trainer_client.client.transport.credentials import Credentials
from trainer_client.config.batch_sizes import BatchKeys
from trainer_client.config.deepspeed_keys import with_rows
from trainer_client.config.dtype_names import DTypeName
from trainer_client.config.execution import ActivationCheckpointingSection, CheckpointSection
from trainer_client.config.paramserver import ParamserverSection
from trainer_client.config.precision import Bf16Section, DataTypesSection, Fp16Section, TorchAutocastSection
from trainer_client.config.zero import OffloadSection, ZeroSection
from trainer_client.optimizers.registry import AnyOptimizerSection
from trainer_client.schedules.registry import AnyScheduleSection

DEFAULT_STATE_DIR = "paramserver-state"

_LEVELS = ("debug", "info", "warning", "error", "critical")


def _in_lower_case(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _never_if_infinite(value: Any) -> Any:
    """Return null for an infinite number of steps, which means that nothing is printed."""
    return None if isinstance(value, float) and math.isinf(value) else value


def _require_level(value: str | None) -> str | None:
    if value is not None and value.lower() not in _LEVELS:
        raise ValueError(f"write one of {', '.join(_LEVELS)}")
    return value


@with_rows()
class DeepSpeedKeys(BatchKeys):
    """The keys of DeepSpeed's config but `optimizer` and `scheduler`, whose sections depend on their `type`."""

    gradient_clipping: NonNegativeFloat = Field(default=0.0, description="limit of the gradient's global norm; 0: none")
    communication_data_type: DTypeName | None = Field(
        default=None,
        description="in which gradients are added over the ranks: `fp32`, `bf16`, `fp16`; null: the parameter's",
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_in_lower_case)] = Field(
        default="mean", description="a step's gradient: the `mean` of those of the ranks, or their `sum`; stages 0 to 2"
    )
    bf16: Bf16Section = Field(default=Bf16Section(), description="training in bf16")
    fp16: Fp16Section = Field(default=Fp16Section(), description="training in fp16")
    torch_autocast: TorchAutocastSection = Field(
        default=TorchAutocastSection(), description="the forward pass under `torch.autocast`"
    )
    data_types: DataTypesSection = Field(default=DataTypesSection(), description="types of accumulated data")
    zero_optimization: ZeroSection = Field(default=ZeroSection(), description="ZeRO")
    # Ranks may have different values of `steps_per_print`, because only rank 0 prints.
    steps_per_print: Annotated[PositiveInt | None, Agreement.NONE, BeforeValidator(_never_if_infinite)] = Field(
        default=10,
        description="steps between log lines, which say what the [step cost](performance.md); null or infinite: none",
    )
    log_level: Annotated[str | None, Agreement.NONE, AfterValidator(_require_level)] = Field(
        default=None,
        description="level of the loggers `trainer_client` and `DeepSpeed`: debug, info, warning, error or critical; "
        "null: as the program has set it",
    )
    activation_checkpointing: ActivationCheckpointingSection = Field(
        default=ActivationCheckpointingSection(),
        description="what becomes of the boundaries of activation checkpoints; the model makes them",
    )
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="DeepSpeed's checkpoints")


class TrainingConfig(DeepSpeedKeys):
    """The whole training config, as `load_config` returns it after all checks.

    Attributes:
        automatic: the dotted names of the honoured keys that were "auto" in the config that was read.
        ignored: the keys at the top of the config that was read which are no keys of this class, with the reason why
            each has no effect.
    """

    optimizer: AnyOptimizerSection | None = Field(
        default=None, discriminator="type", description="the optimizer; null: it is passed to `initialize`"
    )
    scheduler: AnyScheduleSection | None = Field(
        default=None,
        discriminator="type",
        description="the learning-rate schedule; null, or if one is passed to `initialize`: that one, or none",
    )
    paramserver: ParamserverSection = Field(default=ParamserverSection(), description="the store")

    _automatic: tuple[str, ...] = PrivateAttr(default=())
    _ignored: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def automatic(self) -> tuple[str, ...]:
        """The dotted names of the honoured keys that were "auto" in the config that was read."""
        return self._automatic

    def note_automatic(self, paths: tuple[str, ...]) -> None:
        """Set the attribute `automatic` to `paths`. `load_config` calls this once."""
        self._automatic = paths

    @property
    def ignored(self) -> Mapping[str, str]:
        """The keys at the top of the config that was read which are no keys of this class, with the reason."""
        return self._ignored

    def note_ignored(self, keys: Mapping[str, str]) -> None:
        """Set the attribute `ignored` to `keys`. `load_config` calls this once."""
        self._ignored = keys

    def value_at(self, path: str) -> Any:
        """Return the value of a key by its dotted name; None within a section that is not there."""
        value: Any = self
        for key in path.split("."):
            value = None if value is None else getattr(value, key)
        return value

    @property
    def offloads_activations(self) -> bool:
        """Whether the config asks the engine to move the boundaries of activation checkpoints to the store."""
        offload = self.paramserver.activations.offload
        return self.activation_checkpointing.cpu_checkpointing if offload is None else offload

    def store_address(self, environ: Mapping[str, str]) -> str | None:
        """Return the address of a daemon that an operator runs, or None if the job has to start one."""
        return self.paramserver.address or environ.get(ADDRESS_VARIABLE) or None

    def daemon_values(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the values on which the ranks of a node must agree, as JSON by key.

        They must agree because one of these ranks starts a daemon that all of them use.
        """
        if self.store_address(environ) is not None:
            return {f"paramserver.address (or ${ADDRESS_VARIABLE})": json.dumps("given")}
        directory = {"paramserver.state_dir (or nvme_path)": json.dumps(str(self.state_dir().absolute()))}
        return dict(self.values(Agreement.NODE)) | directory

    def credentials(self, environ: Mapping[str, str]) -> Credentials:
        """Return the credentials for a daemon that an operator runs; a key of the config overrides the environment.

        Raises:
            ConfigError: only some of the three TLS files are given.
        """
        section, fallback = self.paramserver, Credentials.from_environment(environ)
        return Credentials(
            token_file=section.token_file or fallback.token_file,
            tls_ca=section.tls.ca or fallback.tls_ca,
            tls_certificate=section.tls.certificate or fallback.tls_certificate,
            tls_key=section.tls.key or fallback.tls_key,
            insecure=section.insecure,
        )

    def state_dir(self) -> Path:
        """Return the state directory of the job's own daemon."""
        nvme_path = next(iter(self.nvme_paths().values()), None)
        return self.paramserver.state_dir or nvme_path or Path(DEFAULT_STATE_DIR)

    def offloads(self) -> dict[str, OffloadSection]:
        """Return the sections `offload_param` and `offload_optimizer` that the config has, by dotted name."""
        zero = self.zero_optimization
        sections = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
        return {f"zero_optimization.{name}": section for name, section in sections.items() if section is not None}

    def nvme_paths(self) -> dict[str, Path]:
        """Return the path in `nvme_path` of each offload section whose device is NVMe, by the key's dotted name."""
        return {
            f"{name}.nvme_path": section.nvme_path
            for name, section in self.offloads().items()
            if section.nvme_path is not None and section.device == "nvme"
        }
