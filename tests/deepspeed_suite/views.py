"""Private names of DeepSpeed that its tests read, as views of what this library has.

Owns the views. Each returns a value that this library has under another name, or has a function called where it does
what DeepSpeed's function of that name does. Must never change what the library does, nor answer for something that it
does not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer_client.engine import Engine
from trainer_client.model.reduction_dtypes import MARK, marked_dtype
from trainer_client.run.checkpoint_files import MANIFEST
from trainer_client.run.checkpoints import Checkpoints
from trainer_client.step.precision import PrecisionPolicy
from trainer_client.store_optimizer import StoreOptimizer

_hand_over = Checkpoints.hand_over
_load_checkpoint = Engine.load_checkpoint
# The engines whose `load_checkpoint` runs, with the directory and the tag that it was given.
_loading: list[tuple[Any, Any, Any]] = []


class _AnyZeroOptimizer(type):
    """The class of a class of which the optimizer of an engine at the stages 1 to 3 is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether the object is such an optimizer."""
        engine = instance._engine() if isinstance(instance, StoreOptimizer) and instance._engine is not None else None
        return isinstance(engine, Engine) and engine.zero_optimization()


class ZeROOptimizer(metaclass=_AnyZeroOptimizer):
    """DeepSpeed's base class of all optimizers of ZeRO."""


# Names of modules of DeepSpeed that this library does not have, by module. Those of runtime.torch_autocast are about
# the dtype in which a parameter's gradient is reduced.
NAMES: Mapping[str, Mapping[str, Any]] = {
    "deepspeed.runtime.base_optimizer": {"ZeROOptimizer": ZeROOptimizer},
    "deepspeed.runtime.torch_autocast": {
        "PARAM_COMM_DTYPE_ATTR_NAME": MARK,
        "has_comm_dtype": lambda parameter: marked_dtype(parameter) is not None,
        "get_comm_dtype": lambda parameter: marked_dtype(parameter) or parameter.dtype,
    },
}


def _config(engine: Engine) -> SimpleNamespace:
    """Return the dtypes that the section `data_types` of the config says; None: it says none."""
    section = engine._settings.data_types
    policy = PrecisionPolicy.of(engine._settings)
    return SimpleNamespace(param_dtype=section.param_dtype, buffer_dtype=policy.buffer_dtype)


def _optimizer_file(engine: Engine, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
    """Return the file of a checkpoint that has the optimizer's states: the manifest, which names them in the store."""
    return str(Path(checkpoints_path) / str(tag) / MANIFEST)


def _load(engine: Engine, load_dir: Any, tag: Any = None, *arguments: Any, **options: Any) -> Any:
    """Load a checkpoint as the library does, so that `_note_states` finds the engine."""
    _loading.append((engine, load_dir, tag))
    try:
        return _load_checkpoint(engine, load_dir, tag, *arguments, **options)
    finally:
        _loading.pop()


def _note_states(checkpoints: Checkpoints, loaded: Any, step: int, *, with_states: bool) -> None:
    """Hand values over as the library does, and ask for the file of the optimizer's states where they are loaded.

    DeepSpeed asks there, too, and its tests watch the function to find out whether states are loaded.
    """
    if with_states and _loading:
        engine, load_dir, tag = _loading[-1]
        engine._get_optimizer_ckpt_name(load_dir, tag)
    _hand_over(checkpoints, loaded, step, with_states=with_states)


def install() -> None:
    """Give the engine these names. Idempotent."""
    engine: Any = Engine
    engine._config = property(_config)
    engine._get_optimizer_ckpt_name = _optimizer_file
    engine.load_checkpoint = _load
    checkpoints: Any = Checkpoints
    checkpoints.hand_over = _note_states
