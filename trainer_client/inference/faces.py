"""`init_inference` as DeepSpeed has it, `load_checkpoint_and_dispatch` and `disk_offload` as Accelerate has them.

This module decides what each argument of these functions means here. It must never ignore an argument that changes the
result in DeepSpeed or Accelerate.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paramserver.contract.address import ADDRESS_VARIABLE
from trainer_client import comm
from trainer_client.config.loading import load_config
from trainer_client.engine.start import InitialArguments
from trainer_client.errors import ConfigError
from trainer_client.inference.engine import InferenceEngine
from trainer_client.inference.opening import open_engine
from trainer_client.interface_version import log_version
from trainer_client.training.initial.deferred_init import RecipeRecorder
from trainer_client.training.model.leaves import mark_configured_leaves
from trainer_client.training.model.owners import is_owned
from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.model.unit_policy import choose_policy

log = logging.getLogger(__name__)

_NO_KERNELS = "DeepSpeed's inference kernels are not built: leave it out, and the model's own forward computes"
_NO_PARALLEL = "tensor and expert parallelism are not built: start several processes, which share the weights in memory"
_NO_QUANT = "weights are used in the dtype that they are stored in: leave it out, or quantize the model before"
_SERVED_ELSEWHERE = "the store keeps the weights: name the job with paramserver.job"

# DeepSpeed's arguments that are refused unless they have one of the values in the tuple, with which DeepSpeed, too,
# would do nothing. The text after the tuple says what to do instead of passing the argument.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "replace_with_kernel_inject": ((False, None), _NO_KERNELS),
    "kernel_inject": ((False, None), _NO_KERNELS),
    "injection_policy": ((None,), _NO_KERNELS),
    "injection_dict": ((None,), _NO_KERNELS),
    "injection_policy_tuple": ((None,), _NO_KERNELS),
    "use_triton": ((False,), _NO_KERNELS),
    "triton_autotune": ((False,), _NO_KERNELS),
    "enable_cuda_graph": ((False,), "CUDA graphs are not built, because weights change their place: leave it out"),
    "use_cuda_graph": ((False,), "CUDA graphs are not built, because weights change their place: leave it out"),
    "tensor_parallel": ((None, {}, {"tp_size": 1}, {"enabled": False}), _NO_PARALLEL),
    "tp": ((None, {}, {"tp_size": 1}, {"enabled": False}), _NO_PARALLEL),
    "mp_size": ((1,), _NO_PARALLEL),
    "mpu": ((None,), _NO_PARALLEL),
    "moe": ((False, None, {}, {"enabled": False}), _NO_PARALLEL),
    "ep_size": ((1,), _NO_PARALLEL),
    "ep_group": ((None,), _NO_PARALLEL),
    "ep_mp_group": ((None,), _NO_PARALLEL),
    "expert_group": ((None,), _NO_PARALLEL),
    "expert_mp_group": ((None,), _NO_PARALLEL),
    "quant": ((None, {}, {"enabled": False}), _NO_QUANT),
    "quantization_setting": ((None,), _NO_QUANT),
    "save_mp_checkpoint_path": ((None,), _SERVED_ELSEWHERE),
    "checkpoint_config": ((None, {}), "pass checkpoint=, the path of a safetensors file or directory"),
    "base_dir": (("", None), "pass checkpoint=, the path of a safetensors file or directory"),
}
# DeepSpeed's arguments that only control its kernels or the loading of its checkpoints. A warning says that they have
# no effect here.
_WITHOUT_EFFECT = frozenset(
    {
        "triangular_masking",
        "return_tuple",
        "training_mp_size",
        "replace_method",
        "max_out_tokens",
        "max_tokens",
        "min_out_tokens",
        "min_tokens",
        "transposed_mode",
        "set_empty_params",
        "moe_experts",
        "moe_type",
        "keep_module_on_host",
    }
)
_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
}


@RecipeRecorder.suspended()
def init_inference(model: nn.Module, config: Mapping[str, Any] | None = None, **kwargs: Any) -> InferenceEngine:
    """Return an engine that computes with weights from the store. The signature is DeepSpeed's.

        engine = init_inference(model, dtype=torch.bfloat16, checkpoint="model_dir")

    Args:
        model: the model, with values, or on the meta device.
        config: the arguments as a dict; an argument that is also given by name must have the same value there.
        kwargs: `dtype` (of parameters and floating-point buffers, which are converted; None: each keeps its dtype),
            `checkpoint` (a safetensors file or directory, which is put into the store once), `zero` (the section
            `zero_optimization`), and this library's section `paramserver`. docs/inference.md describes the other
            arguments.

    Raises:
        ConfigError: an argument is unknown, or cannot be honoured.
        StoreError, LocalDaemonError: the store refused, cannot be reached or cannot be started.
    """
    given = dict(config or {})
    if twice := [name for name, value in kwargs.items() if name in given and given[name] != value]:
        raise ConfigError(f"init_inference({twice[0]}=...) differs from the value in its config: pass one")
    given |= kwargs
    _check_arguments(given)
    if comm.get_rank() == 0:
        log_version()
    return _open(
        model,
        dtype=given.get("dtype"),
        checkpoint=given.get("checkpoint"),
        strict=True,
        zero=given.get("zero"),
        paramserver=given.get("paramserver"),
    )


@RecipeRecorder.suspended()
def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[str | int, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: torch.dtype | str | None = None,
    strict: bool = False,
    *,
    paramserver: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Make a model compute with a checkpoint's weights, which are put into the store once, and return the model.

    The signature is that of Accelerate, without the arguments that would have no meaning here. The attribute
    `paramserver_engine` of the model is the engine; its `close()` ends the use of the store.

    Args:
        model: the model, usually built under `torch.device("meta")` or `zero.Init()`.
        checkpoint: a safetensors file, or a directory with one file or with an index of several files.
        device_map: None, "auto" or "cpu": the store decides what stays in memory.
        max_memory: {"cpu": BYTES}: the most bytes of host memory for the weights.
        no_split_module_classes: names of classes; a module of such a class is fetched from the store as a whole.
        offload_folder: the state directory of the daemon that this process starts if no daemon is named; None:
            `./paramserver-state`.
        offload_buffers: refused, because buffers stay in memory.
        dtype: the dtype of the parameters; None: the model's.
        strict: whether the model and the files must have the same names.
        paramserver: the section `paramserver` of the training config: `address`, `job` and so on.

    Raises:
        ConfigError: an argument cannot be honoured, or the files do not fit the model.
        StoreError, LocalDaemonError: the store refused, cannot be reached or cannot be started.
    """
    name = "load_checkpoint_and_dispatch"
    if not (device_map is None or device_map in ("auto", "cpu")):
        raise ConfigError(f"{name}(device_map={device_map!r}): write 'auto', because the store moves the weights")
    _refuse_buffers(name, offload_buffers)
    section = _with_memory(dict(paramserver or {}), name, max_memory)
    if no_split_module_classes:
        section["units"] = {"classes": list(no_split_module_classes)}
    return _dispatch(model, offload_folder, dtype=dtype, checkpoint=checkpoint, strict=strict, paramserver=section)


@RecipeRecorder.suspended()
def disk_offload(
    model: nn.Module,
    offload_dir: str | Path | None = None,
    offload_buffers: bool = False,
    *,
    max_memory: Mapping[str | int, int | str] | None = None,
    paramserver: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Put a model's weights into the store, free their memory, and return the model. It computes as before.

    Args:
        model: the model, with values.
        offload_dir: the state directory of the daemon that this process starts if no daemon is named; None:
            `./paramserver-state`.
        offload_buffers: refused, because buffers stay in memory.
        max_memory, paramserver: see `load_checkpoint_and_dispatch`.

    Raises:
        ConfigError, StoreError, LocalDaemonError: see `load_checkpoint_and_dispatch`.
    """
    _refuse_buffers("disk_offload", offload_buffers)
    section = _with_memory(dict(paramserver or {}), "disk_offload", max_memory)
    return _dispatch(model, offload_dir, dtype=None, checkpoint=None, strict=True, paramserver=section)


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of init_inference that is refused or unknown."""
    idle = []
    for name, value in given.items():
        if name in _REFUSED:
            harmless, remedy = _REFUSED[name]
            if value not in harmless:
                raise ConfigError(f"init_inference({name}={value!r}) is not honoured: {remedy}")
        elif name in _WITHOUT_EFFECT:
            idle.append(name)
        elif name not in ("dtype", "checkpoint", "zero", "paramserver"):
            raise ConfigError(f"init_inference({name}=...): there is no such argument")
    if idle:
        log.warning("without effect in init_inference: %s", ", ".join(sorted(idle)))


def _refuse_buffers(name: str, offload_buffers: bool) -> None:
    if offload_buffers:
        raise ConfigError(f"{name}(offload_buffers=True): buffers stay in memory; leave it out")


def _with_memory(
    section: dict[str, Any], name: str, max_memory: Mapping[str | int, int | str] | None
) -> dict[str, Any]:
    """Return the section `paramserver` of the config, in which Accelerate's `max_memory` limits the host memory.

    `name` is the function that the user has called, for messages.
    """
    if max_memory is None:
        return section
    if set(max_memory) != {"cpu"}:
        raise ConfigError(f"{name}(max_memory={dict(max_memory)!r}): write {{'cpu': BYTES}}, the store's host memory")
    limit = max_memory["cpu"]
    inference = dict(section.get("inference", {}))
    inference.setdefault("host_bytes", limit)
    section["inference"] = inference
    if not section.get("address") and not os.environ.get(ADDRESS_VARIABLE):
        section.setdefault("host_budget", limit)
    return section


def _dispatch(
    model: nn.Module,
    folder: str | Path | None,
    *,
    dtype: torch.dtype | str | None,
    checkpoint: str | Path | None,
    strict: bool,
    paramserver: dict[str, Any],
) -> nn.Module:
    if folder is not None:
        paramserver.setdefault("state_dir", str(folder))
    engine = _open(model, dtype=dtype, checkpoint=checkpoint, strict=strict, zero=None, paramserver=paramserver)
    # `object.__setattr__` makes the engine an attribute of the model. A plain assignment would make the engine, which
    # is an nn.Module, a submodule of the model.
    object.__setattr__(model, "paramserver_engine", engine)
    return model


def _open(
    model: nn.Module,
    *,
    dtype: Any,
    checkpoint: str | Path | None,
    strict: bool,
    zero: Mapping[str, Any] | None,
    paramserver: Mapping[str, Any] | None,
) -> InferenceEngine:
    """Return the engine that the functions of this module return or attach to the model.

    If the caller names neither a daemon nor a host budget, this process starts a daemon, whose host budget is computed
    from the size of the model.
    """
    wanted = _dtype(dtype)
    if owned := [name for name, tensor in model.named_parameters() if is_owned(tensor)]:
        raise ConfigError(
            f"parameter {owned[0]} of the model belongs to another engine, and a model has one engine at a time: close "
            "an engine for inference first; of a model that is or was trained, pass a new instance"
        )
    if wanted is torch.float32 and any(p.dtype != torch.float32 for p in model.parameters()):
        model.float()
    parameters = list_parameters(model)
    section = dict(paramserver or {})
    on_meta = [parameter.fqn for parameter in parameters if parameter.tensor.is_meta]
    if "job" not in section and checkpoint is None and on_meta:
        raise ConfigError(
            f"parameter {on_meta[0]} is on the meta device: pass checkpoint=, or the stored job as "
            "paramserver={'job': NAME}"
        )
    has_daemon = bool(section.get("address") or os.environ.get(ADDRESS_VARIABLE))
    if not has_daemon and "host_budget" not in section:
        itemsize = (lambda p: wanted.itemsize) if wanted else (lambda p: p.tensor.dtype.itemsize)
        section["host_budget"] = _budget(sum(p.shape.numel() * itemsize(p) for p in parameters))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3} | dict(zero or {}),
        "paramserver": section,
    }
    if wanted in (torch.bfloat16, torch.float16):
        config["bf16" if wanted is torch.bfloat16 else "fp16"] = {"enabled": True}
    settings = load_config(config, os.environ, {p.tensor.dtype for p in parameters})
    if settings.zero_optimization.stage != 3:
        raise ConfigError(f"zero.stage {settings.zero_optimization.stage}: write 3, because the store has the weights")
    policy = choose_policy(settings.paramserver.units, None)
    mark_configured_leaves(model, settings.zero_optimization)
    engine = open_engine(model, parameters, settings, policy, InitialArguments(checkpoint, strict))
    if wanted is not None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(wanted)
    return engine


def _dtype(dtype: Any) -> torch.dtype | None:
    if dtype is None:
        return None
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r}: weights are float32, bfloat16 or float16; {_NO_QUANT}")
    return _DTYPES[dtype]


def _budget(model_bytes: int) -> int:
    """Return the host budget (bytes) of a daemon for one model: the model's size with a margin.

    It is at most half of the machine's memory.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(model_bytes * 5 // 4 + (64 << 20), machine // 2)
