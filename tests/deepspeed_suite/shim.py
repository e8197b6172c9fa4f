"""What every process of DeepSpeed's tests imports first, so that `import deepspeed` imports this library.

This module owns four adaptations:

- A name that this library does not have is a class whose use raises NotBuiltError, because otherwise one such name
  among a file's imports would hide all tests of the file.
- Each call of `initialize` trains a job of its own, because the tests start many runs beside each other and expect none
  of them to go on from another one.
- Master weights begin rounded to the dtype of the forward, as DeepSpeed's do (paramserver.initial_weights), because the
  tests compare with plain models in that dtype.
- There are as many devices as the largest test has ranks, because a test that needs more is skipped.

views.py adds those private names of DeepSpeed that are views of what this library has.

This module must never change what a call of this library does.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

import trainer_client
from tests.deepspeed_suite import views
from trainer_client import as_deepspeed, comm, initialization
from trainer_client.accelerator import DeviceAccelerator
from trainer_client.base.not_built import NotBuilt
from trainer_client.config.config_file import read_config_file
from trainer_client.config.training_config import TrainingConfig
from trainer_client.deepspeed.finder import Alias

_DEVICES = 4

# The module as an object whose attributes may be replaced.
_initialization: Any = initialization
_load_config = _initialization.load_config
_open_whole_engine = _initialization.open_whole_engine
_init_distributed = comm.init_distributed
_calls = itertools.count()
# The name of the present group of ranks, which begins the names of their jobs; empty before the first run.
_group: list[str] = []


class _Absent(Loader):
    """Makes an empty module in place of a module of DeepSpeed that this library does not have."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Have Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module every name, as a class that cannot be used."""
        _answer_all_names(module)
        if module.__name__ == "deepspeed.git_version_info":
            # DeepSpeed writes this file when it is built. These versions mean "ask torch".
            module.torch_info = dict.fromkeys(  # type: ignore[attr-defined]
                ("version", "cuda_version", "nccl_version", "hip_version"), "0.0"
            )
        vars(module).update(views.NAMES.get(module.__name__, {}))
        if module.__name__ == "deepspeed.runtime.swap_tensor":
            # Tests make a model of this size, so that DeepSpeed swaps its tensors.
            module.MIN_SWAPPABLE_BYTES = 1024 * 1024  # type: ignore[attr-defined]


class _AbsentFinder(MetaPathFinder):
    """Finds the modules of DeepSpeed that this library does not have."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how to import such a module; None for every other one."""
        return ModuleSpec(name, _Absent(), is_package=True) if name.startswith("deepspeed.") else None


class _Present(Alias):
    """Puts a module of this library in the place of DeepSpeed's, and adds the names that it lacks."""

    def exec_module(self, module: ModuleType) -> None:
        """Import the module of this library."""
        super().exec_module(module)
        present = sys.modules[module.__name__]
        vars(present).update(views.NAMES.get(module.__name__, {}))
        _answer_all_names(present)


def _answer_all_names(module: ModuleType) -> None:
    """Make `from module import NAME` work for every name: a submodule, or a class that cannot be used."""
    own = getattr(module, "__getattr__", None)

    def answer(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                pass
        submodule = f"{module.__name__}.{name}"
        if (
            module.__name__.startswith("trainer_client")
            and hasattr(module, "__path__")
            and importlib.util.find_spec(submodule) is not None
        ):
            return importlib.import_module(submodule)
        return type(name, (NotBuilt,), {"NAME": name}, remedy="only DeepSpeed's own tests use it")

    module.__getattr__ = answer  # type: ignore[method-assign]


def _load_with_job(source: Mapping[str, Any] | str | Path, *arguments: Any) -> Any:
    """Read a config as `load_config` does, with a job of its own and rounded weights if the config says neither."""
    written = source if isinstance(source, Mapping) else read_config_file(Path(source))
    if not _group:
        _group.append(uuid.uuid4().hex)
    begin = {"job": f"{_group[0]}-{next(_calls)}", "initial_weights": "rounded"}
    section = begin | dict(written.get("paramserver", {}))
    return _load_config({**written, "paramserver": section}, *arguments)


def _open_whole(model: Any, parameters: Any, settings: TrainingConfig, *arguments: Any) -> Any:
    """Open an engine that has no store without the name of a job, which `_load_with_job` has added."""
    settings.paramserver.model_fields_set.discard("job")
    return _open_whole_engine(model, parameters, settings, *arguments)


def _init_with_name(*arguments: Any, **options: Any) -> None:
    """Initialise torch.distributed as the library does, and agree on the name of a new group of ranks.

    The ranks of a group that exists already have agreed, and may be within zero.Init, which refuses this exchange.
    """
    is_new = not dist.is_initialized()
    _init_distributed(*arguments, **options)
    if is_new:
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names)
        _group[:] = names


def install() -> None:
    """Adapt this process. Idempotent, because processes are forked from one that is adapted."""
    if _initialization.load_config is _load_with_job:
        return
    _initialization.load_config = _load_with_job
    _initialization.open_whole_engine = _open_whole
    comm.init_distributed = trainer_client.init_distributed = _init_with_name
    DeviceAccelerator.device_count = lambda self: _DEVICES  # type: ignore[method-assign]
    views.install()
    as_deepspeed.Alias = _Present  # type: ignore[attr-defined]
    sys.meta_path.append(_AbsentFinder())
    importlib.import_module("deepspeed")
    # DeepSpeed's tests ask here what can be compiled on this machine. Adam and NVMe files need no compiler here.
    ops: Any = importlib.import_module("trainer_client.ops")
    ops.__compatible_ops__ = defaultdict(bool, FusedAdamBuilder=True, CPUAdamBuilder=True, AsyncIOBuilder=True)


install()
