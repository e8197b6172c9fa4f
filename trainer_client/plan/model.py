"""The model of a plan, built without memory: from a Hugging Face config, or by a callable that the user names.

This module must never give a parameter memory, nor download anything.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_client.errors import ConfigError


def find_builder(source: str) -> Callable[[], nn.Module]:
    """Return a function that builds the model on the default device, which `build` sets to the meta device.

    Args:
        source: a config.json of Hugging Face, a directory with one, or MODULE:CALLABLE. The callable, which may be a
            class, takes no arguments.

    Raises:
        ConfigError: there is no such file or callable, or a package that it needs is missing.
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".json":
        return _from_hugging_face(path)
    if ":" not in source:
        raise ConfigError(
            f"{source!r} is no model: give a config.json, a directory with one, or MODULE:CALLABLE, as in train:build"
        )
    found = import_named(source)
    if not callable(found):
        raise ConfigError(f"{source} is a {type(found).__name__}: name a function or class that returns the model")
    return lambda: _checked(found(), source)


def import_named(source: str) -> Any:
    """Return the object that MODULE:NAME names; the module may lie in the working directory.

    Raises:
        ConfigError: there is no such object, or the module's own code fails.
    """
    module, _, name = source.partition(":")
    if not module or not name:
        raise ConfigError(f"{source!r} names no object of a module: write MODULE:CALLABLE, as in train:build")
    # A console script has no entry "" in sys.path, so Python would not look for modules in the working directory. So
    # the entry is added.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source}: {error}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{source}: the import of {module!r} raises {type(error).__name__}: {error}; name a module that only "
            "defines things when it is imported"
        ) from error
    return found


def build(builder: Callable[[], nn.Module], mode: AbstractContextManager[Any] | None = None) -> nn.Module:
    """Return the model, built on the meta device or, if `mode` is given, within that context.

    Raises:
        ConfigError: the builder fails.
    """
    try:
        with torch.device("meta") if mode is None else mode:
            return builder()
    except ConfigError:
        raise
    except Exception as error:
        why = f"the model cannot be built without memory: {type(error).__name__}: {error}"
        hint = "; leave zero.Init out, which a plan does not need" if "meta tensors" in str(error) else ""
        raise ConfigError(why + hint) from error


def _from_hugging_face(path: Path) -> Callable[[], nn.Module]:
    try:
        import transformers  # noqa: PLC0415 - an optional package, which only such models need
    except ImportError:
        raise ConfigError(f"{path}: pip install transformers, or give MODULE:CALLABLE") from None
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"there is no {file}: give a config.json, a directory with one, or MODULE:CALLABLE")
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} is no config that transformers {transformers.__version__} knows: {error}") from None
    config.use_cache = False
    names = getattr(config, "architectures", None) or ()
    architecture = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if architecture is not None:
        return lambda: _checked(architecture(config), str(file))
    causal: Any = transformers.AutoModelForCausalLM
    return lambda: _checked(causal.from_config(config), str(file))


def _checked(model: Any, source: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source} returns a {type(model).__name__}, not a torch.nn.Module")
    return model
