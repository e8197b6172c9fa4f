"""The older names and forms of DeepSpeed's keys, which are read as the keys of today.

This module owns the list of them and the conversion of a raw config. It must never check a value: the sections do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_client.errors import ConfigError

_ZERO = "zero_optimization"


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderName:
    """A key that DeepSpeed had, or that it accepts beside the name in its documentation.

    Attributes:
        section: the name of the section that has both keys; "" is the whole config.
        name: the older key.
        instead: the key of today.
        switched_on: the value of the key of today, if the older key is a switch. A switch that is off has no effect.
            None: both keys have the same values.
    """

    name: str
    instead: str
    section: str = ""
    switched_on: Any = None

    @property
    def path(self) -> str:
        """The dotted name of the older key."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def path_instead(self) -> str:
        """The dotted name of the key that replaces the older one."""
        return f"{self.section}.{self.instead}" if self.section else self.instead


# The keys of ZeRO stage 3 that DeepSpeed also accepts without their prefix `stage3_`.
_STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
_ON_CPU = {"device": "cpu"}

OLDER_NAMES = (
    OlderName(name="bfloat16", instead="bf16"),
    OlderName(name="fp32_allreduce", instead="communication_data_type", switched_on="fp32"),
    OlderName(section=_ZERO, name="cpu_offload", instead="offload_optimizer", switched_on=_ON_CPU),
    OlderName(section=_ZERO, name="cpu_offload_param", instead="offload_param", switched_on=_ON_CPU),
    OlderName(section=_ZERO, name="cpu_offload_params", instead="offload_param", switched_on=_ON_CPU),
    OlderName(
        section=_ZERO,
        name="stage3_gather_fp16_weights_on_model_save",
        instead="stage3_gather_16bit_weights_on_model_save",
    ),
    *(OlderName(section=_ZERO, name=name, instead=f"stage3_{name}") for name in _STAGE_3),
)


def with_todays_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of today in place of older ones.

    Raises:
        ConfigError: a key is given under both names, with different values.
    """
    config = dict(raw)
    if isinstance(stage := config.get(_ZERO), bool):
        config[_ZERO] = {"stage": int(stage)}
    for older in OLDER_NAMES:
        section = config.get(older.section) if older.section else config
        if not isinstance(section, Mapping) or older.name not in section:
            continue
        changed = dict(section)
        value = changed.pop(older.name)
        if older.switched_on is not None:
            value = older.switched_on if value else None
        if value is not None:
            if changed.get(older.instead, value) != value:
                raise ConfigError(
                    f"{older.path} is an older name of {older.path_instead}, and both are given: write "
                    f"{older.path_instead} alone"
                )
            changed[older.instead] = value
        if older.section:
            config[older.section] = changed
        else:
            config = changed
    return config
