"""The training config, made of a strategy's own config and of the arguments of Lightning's `Trainer`.

This module owns the rules by which the two are combined. It must never import the code that trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from trainer_client.config.automatic import AUTO
from trainer_client.config.config_file import read_config_file
from trainer_client.errors import ConfigError

ConfigSource = Mapping[str, Any] | str | Path | None

# The stage of ZeRO if the config names none, as in Lightning's DeepSpeedStrategy.
_STAGE = 2
_STORE = "paramserver"
_JOB_KEYS = {"job", "resume"}
_MICRO_BATCH = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_PRECISIONS = ("bf16", "fp16", "torch_autocast")
# `lower_precision_safe_modules` is empty, so that gradients keep the dtype of their parameters when they are added up,
# as in Lightning and DDP.
_MIXED: Mapping[str, Any] = {"enabled": True, "lower_precision_safe_modules": []}
# The sections that the Trainer's argument `precision` adds to the engine's config, for each value of the argument.
_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "32-true": {},
    "bf16-true": {"bf16": {"enabled": True}},
    "bf16-mixed": {"torch_autocast": {**_MIXED, "dtype": "bf16"}},
    "16-mixed": {"torch_autocast": {**_MIXED, "dtype": "fp16"}},
}


def read_config(config: ConfigSource) -> dict[str, Any]:
    """Return a copy of the strategy's config, with ZeRO's default stage if the config names no stage."""
    if config is None:
        # If the strategy is made without a config, the engine does not clip gradients: the Trainer clips them by its
        # `gradient_clip_val`, or they are not clipped.
        raw: dict[str, Any] = {"gradient_clipping": 0}
    else:
        raw = deepcopy(dict(config if isinstance(config, Mapping) else read_config_file(Path(config))))
    return {**raw, "zero_optimization": {"stage": _STAGE, **raw.get("zero_optimization", {})}}


def check_precision(precision: str) -> None:
    """Raise ConfigError for a `precision` of the Trainer that is not honoured."""
    if precision not in _SECTIONS:
        raise ConfigError(
            f"Trainer(precision={precision!r}) is not honoured with ParamserverStrategy: write one of "
            f"{', '.join(map(repr, _SECTIONS))}, or a section bf16 or fp16 in the strategy's config"
        )


def training_config(
    raw: Mapping[str, Any], *, precision: str, accumulation: int, world_size: int, batch_size: int | None, job: str
) -> dict[str, Any]:
    """Return the config for `initialize`.

    Args:
        raw: the config as `read_config` returned it.
        precision: the Trainer's `precision`, as Lightning writes it, for example "bf16-mixed".
        accumulation: the number of micro-batches in a step, which Lightning counts.
        batch_size: the number of samples in a micro-batch of one rank; None: the data loader does not give it.
        job: the name of the job, if the config does not name one.

    Raises:
        ConfigError: the Trainer and the config contradict each other.
    """
    config = deepcopy(dict(raw))
    micro, train, steps = (_number(config.pop(key, None)) for key in (_MICRO_BATCH, "train_batch_size", _ACCUMULATION))
    if steps not in (None, accumulation):
        raise ConfigError(
            f"{_ACCUMULATION} is {steps} in the config, and Trainer(accumulate_grad_batches={accumulation}): leave it "
            "out of the config"
        )
    step = accumulation * world_size
    if micro is None:
        micro = train // step if train is not None else batch_size or 1
    if train not in (None, micro * step):
        raise ConfigError(
            f"train_batch_size = {train} is not {_MICRO_BATCH} * accumulate_grad_batches * ranks = "
            f"{micro} * {accumulation} * {world_size}: change one of them, or leave it out"
        )
    store = config.get(_STORE, {})
    if _JOB_KEYS.isdisjoint(store):
        config[_STORE] = {**store, "job": job}
    _join_precision(config, precision)
    # The engine must not count micro-batches, because Lightning divides the loss and decides where a step ends.
    return {**config, _MICRO_BATCH: micro, "managed_gradient_accumulation": False}


def _join_precision(config: dict[str, Any], precision: str) -> None:
    sections = _SECTIONS[precision]
    for name in _PRECISIONS:
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled") == AUTO:
            config[name] = {**section, "enabled": name in sections}
    enabled = {name for name in _PRECISIONS if isinstance(config.get(name), Mapping) and config[name].get("enabled")}
    if sections and enabled - sections.keys():
        raise ConfigError(
            f"Trainer(precision={precision!r}), but the config enables {', '.join(sorted(enabled))}: leave one of "
            "them out"
        )
    for name, section in sections.items():
        config[name] = {**section, **config.get(name, {})}


def _number(value: Any) -> int | None:
    """Return the value of a config's key as a number; None for "auto" or None."""
    return None if value is None or value == AUTO else int(value)
