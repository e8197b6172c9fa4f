"""The arguments of `Accelerator`, and the training config that follows from them.

This module owns the rules by which Accelerate's arguments and a config in DeepSpeed's format are combined. It must
never import the code that trains.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, DeepSpeedPlugin, GradientAccumulationPlugin

from trainer_client.base.device import CPU
from trainer_client.config.automatic import AUTO
from trainer_client.config.config_file import read_config_file
from trainer_client.config.paramserver import configured_device_kind
from trainer_client.errors import ConfigError

ConfigSource = Mapping[str, Any] | str | Path | None

# The stage of ZeRO if the config names none. DeepSpeedPlugin() chooses this stage, too. Parameters are whole on every
# rank, so that a script may read them, while gradients and optimizer states are divided among the ranks.
_STAGE = 2

# The arguments of Accelerator that make another library shard the model, and the environment variables by which
# `accelerate launch` asks for the same. All of them are refused, because the engine shards the model.
_OTHER_WAYS = ("fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "parallelism_config")
_OTHER_VARIABLES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG")
_USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
_PRECISION = "ACCELERATE_MIXED_PRECISION"
_ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

_STORE = "paramserver"
_JOB_KEYS = {"job", "resume"}
_MICRO_BATCH = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_PLUGIN = "gradient_accumulation_plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `Accelerator`, combined with the training config.

    Attributes:
        arguments: the arguments for Accelerate's own constructor.
        config: the training config as the user or the plug-in has written it, without the values that follow from the
            prepared objects.
        autocasts: whether `Accelerator.autocast` enters autocast.
        converts_outputs: whether the outputs of forward are converted to fp32, as Accelerate converts them under
            autocast.
    """

    arguments: Mapping[str, Any]
    config: Mapping[str, Any]
    autocasts: bool
    converts_outputs: bool

    @classmethod
    def of(
        cls,
        positional: tuple[Any, ...],
        keywords: Mapping[str, Any],
        config: ConfigSource,
        environ: Mapping[str, str],
    ) -> Options:
        """Read the arguments, and the environment of `accelerate launch`.

        Raises:
            ConfigError: an argument cannot be honoured, or two arguments contradict each other.
        """
        # None stands for the `self` of Accelerator's constructor, so that the other arguments are bound to their names.
        arguments = inspect.signature(accelerate.Accelerator.__init__).bind(None, *positional, **keywords).arguments
        given = {name: value for name, value in arguments.items() if name != "self"}
        _refuse_other_ways(given, environ)
        precision = given.get("mixed_precision") or _present_precision() or environ.get(_PRECISION) or "no"
        raw = _read(config, _take_plugin(given, environ), str(precision))
        if configured_device_kind(raw) == CPU:
            # Without the argument `cpu`, Accelerate ignores the ranks that torchrun has started if the machine has no
            # GPU.
            given["cpu"] = True
        joined = _join_precision(raw, str(precision), given)
        given["mixed_precision"] = joined.mixed_precision
        _take_accumulation(raw, given, environ)
        return cls(arguments=given, config=raw, autocasts=joined.autocasts, converts_outputs=joined.converts_outputs)

    @property
    def names_job(self) -> bool:
        """Whether the config has `paramserver.job` or `paramserver.resume`, so that no new job is named."""
        section = self.config.get(_STORE)
        return isinstance(section, Mapping) and not _JOB_KEYS.isdisjoint(section)

    def training_config(
        self, *, accumulation: int, world_size: int, batch_size: int | None, job: str
    ) -> dict[str, Any]:
        """Return the config for `initialize`.

        Args:
            accumulation: the number of micro-batches in a step, which Accelerate counts.
            batch_size: the number of samples in a micro-batch of one rank; None: no data loader gives the number.
            job: the name of the job, if the config does not name one.

        Raises:
            ConfigError: the batch sizes of the config contradict each other.
        """
        config = deepcopy(dict(self.config))
        config["zero_optimization"] = {"stage": _STAGE, **config.get("zero_optimization", {})}
        micro, train = (_number(config.pop(key, None)) for key in (_MICRO_BATCH, "train_batch_size"))
        step = accumulation * world_size
        if train is not None and train != (micro or train // step) * step:
            raise ConfigError(
                f"train_batch_size = {train} is not {_MICRO_BATCH} * {_ACCUMULATION} * processes = "
                f"{micro or 'a whole number'} * {accumulation} * {world_size}: change one of them, or leave it out"
            )
        if micro is None:
            micro = train // step if train is not None else batch_size or 1
        if not self.names_job:
            config[_STORE] = {**config.get(_STORE, {}), "job": job}
        # The engine must not count micro-batches, because Accelerate divides the loss and decides where a step ends.
        return {**config, _MICRO_BATCH: micro, "managed_gradient_accumulation": False}


def _refuse_other_ways(given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    for name in _OTHER_WAYS:
        if given.get(name) is not None:
            raise ConfigError(
                f"Accelerator({name}=...) is not honoured: the config's zero_optimization says what the ranks divide; "
                "leave it out"
            )
    for name in _OTHER_VARIABLES:
        if environ.get(name, "false").lower() == "true":
            raise ConfigError(
                f"${name} is not honoured: the config's zero_optimization says what the ranks divide; choose no "
                "sharding in `accelerate config`, or start the script with torchrun"
            )


@contextmanager
def without_launchers_choice(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Within the context, hide the variable of `accelerate launch --use_deepspeed` in `environ`.

    With this variable, Accelerate would require an installed DeepSpeed, which is not needed here.
    """
    chosen = environ.pop(_USE_DEEPSPEED, None)
    try:
        yield
    finally:
        if chosen is not None:
            environ[_USE_DEEPSPEED] = chosen


def _present_precision() -> str | None:
    """Return the `mixed_precision` of an Accelerator that was made before in this process; None if there is none."""
    return AcceleratorState().mixed_precision if AcceleratorState._shared_state else None


def _take_plugin(given: dict[str, Any], environ: Mapping[str, str]) -> DeepSpeedPlugin | None:
    """Remove DeepSpeed's plug-in from the arguments of `Accelerator`, and return it.

    If there is none, return one made from the environment if `accelerate launch --use_deepspeed` has set it, else None.
    """
    plugin = given.pop("deepspeed_plugin", None) or given.pop("deepspeed_plugins", None)
    given.pop("deepspeed_plugins", None)
    if isinstance(plugin, Mapping):
        if len(plugin) != 1:
            raise ConfigError(f"Accelerator(deepspeed_plugins=...) has {len(plugin)} plug-ins: pass one")
        (plugin,) = plugin.values()
    if plugin is None and environ.get(_USE_DEEPSPEED, "false").lower() == "true":
        return DeepSpeedPlugin()
    return plugin


def _read(config: ConfigSource, plugin: DeepSpeedPlugin | None, precision: str) -> dict[str, Any]:
    """Return a copy of the training config: that of the plug-in if there is one, else the user's `config`.

    Raises:
        ConfigError: both are given, or the file cannot be read.
    """
    if plugin is not None:
        if config is not None:
            raise ConfigError("Accelerator(config=...) and a DeepSpeedPlugin are both given: pass one")
        plugin.set_mixed_precision(precision)
        return deepcopy(dict(plugin.deepspeed_config))
    if config is None:
        # If a script passes no config, the engine does not clip gradients: the script itself calls
        # `accelerator.clip_grad_norm_`, or gradients are not clipped.
        return {"gradient_clipping": 0}
    return deepcopy(dict(config if isinstance(config, Mapping) else read_config_file(Path(config))))


class _Precision(NamedTuple):
    """The number format that Accelerate's arguments and the config choose together.

    It has the value of `mixed_precision` for Accelerate, and the attributes `autocasts` and `converts_outputs` of
    Options.
    """

    mixed_precision: str
    autocasts: bool
    converts_outputs: bool


def _join_precision(raw: dict[str, Any], asked: str, given: Mapping[str, Any]) -> _Precision:
    """Combine the number format of the config with `asked`, the value of Accelerate's `mixed_precision`.

    If only `mixed_precision` chooses a format, the config gets the section that makes the engine use this format.

    Raises:
        ConfigError: the format is unknown or not supported, or differs from the config's.
    """
    if asked not in ("no", "bf16", "fp16"):
        raise ConfigError(f"mixed_precision = {asked!r} is not honoured: write 'no', 'bf16' or 'fp16'")
    for name in ("bf16", "fp16"):
        section = raw.get(name)
        if isinstance(section, Mapping) and section.get("enabled") == AUTO:
            raw[name] = {**section, "enabled": asked == name}
    configured, autocasts = _configured_precision(raw)
    if configured is not None:
        if given.get("mixed_precision") not in (None, configured):
            raise ConfigError(
                f"mixed_precision = {asked!r}, but the config chooses {configured}: leave mixed_precision out, or the "
                "config's section"
            )
        return _Precision(configured, autocasts, converts_outputs=False)
    handlers = given.get("kwargs_handlers") or ()
    handler = next((one for one in handlers if isinstance(one, AutocastKwargs)), AutocastKwargs())
    if handler.cache_enabled is False:
        raise ConfigError("AutocastKwargs(cache_enabled=False) is not honoured: leave it out")
    if asked == "no" or not handler.enabled:
        return _Precision(asked, autocasts=asked != "no", converts_outputs=False)
    # `lower_precision_safe_modules` is empty, so that gradients keep the dtype of their parameters when they are added
    # up, as in Accelerate and DDP.
    raw["torch_autocast"] = {"enabled": True, "dtype": asked, "lower_precision_safe_modules": []}
    return _Precision(asked, autocasts=True, converts_outputs=True)


def _configured_precision(raw: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the config's number format (None if it has none), and whether `torch_autocast` is its section."""
    for name in ("bf16", "fp16"):
        if _is_enabled(raw, name):
            return name, False
    if not _is_enabled(raw, "torch_autocast"):
        return None, False
    is_fp16 = str(raw["torch_autocast"].get("dtype")) in ("fp16", "float16", "torch.float16")
    return "fp16" if is_fp16 else "bf16", True


def _take_accumulation(raw: dict[str, Any], given: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Enter the config's number of micro-batches in a step in the arguments for Accelerate, which counts them.

    Raises:
        ConfigError: Accelerate's own arguments or its environment give another number.
    """
    steps = _number(raw.pop(_ACCUMULATION, None))
    if steps in (None, 1):
        return
    if (plugin := given.get(_PLUGIN)) is not None:
        # Accelerate uses the number of micro-batches in the plug-in and ignores the argument and the environment
        # variable for it. So only the plug-in's number is compared with the config.
        _require_steps(steps, plugin.num_steps, "GradientAccumulationPlugin()")
        return
    for place, number in (
        ("Accelerator()", given.pop(_ACCUMULATION, None)),
        (f"${_ACCUMULATION_VARIABLE}", _number(environ.get(_ACCUMULATION_VARIABLE))),
    ):
        # 1 micro-batch in a step may be the default of Accelerate or of its launcher, so it does not contradict the
        # config.
        if number not in (None, 1):
            _require_steps(steps, number, place)
    # The config's number of micro-batches in a step is passed as a GradientAccumulationPlugin, because Accelerate would
    # prefer the environment variable to the argument `gradient_accumulation_steps`.
    given[_PLUGIN] = GradientAccumulationPlugin(num_steps=steps)


def _require_steps(configured: int | None, number: int | None, place: str) -> None:
    """Raise ConfigError if `place` asks for another number of micro-batches in a step than the config."""
    if number != configured:
        raise ConfigError(f"{_ACCUMULATION} is {configured} in the config and {number} in {place}: write one of them")


def _is_enabled(raw: Mapping[str, Any], name: str) -> bool:
    section = raw.get(name)
    return isinstance(section, Mapping) and section.get("enabled") is True


def _number(value: Any) -> int | None:
    """Return the value of a config's key as a number; None for "auto" or None."""
    return None if value is None or value == AUTO else int(value)
