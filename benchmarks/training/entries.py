"""Who takes part in the training benchmarks, and with which config: this project's placements, and DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.training.contestant_process import Entry
from benchmarks.training.deepspeed_environment import DeepSpeedEnvironment
from benchmarks.training.task import TrainingTask

PLAIN = Entry(name="plain", kind="plain")
COMPUTE = Entry(name="compute", kind="compute")

# Of docs/performance.md: large blocks are mapped, in huge pages, and given back.
TUNED_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304"}

Home = Literal["device", "host", "nvme"]
Durability = Literal["none", "step"]

# Two versions of 14 bytes, and the gradients in bf16.
_HOST_BYTES_PER_PARAMETER = 28
_LEAST_HOST_BYTES = 64 << 20
# Two versions, and what fragments cost.
_NVME_BYTES_PER_PARAMETER = 40
_LEAST_NVME_BYTES = 2 << 30

_AIO = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
# DeepSpeed refuses parameters larger than its buffers.
_LEAST_BUFFER_ELEMENTS = 10_000_000


def ours(
    name: str,
    task: TrainingTask,
    parameters: int,
    home: Home,
    *,
    durability: Durability,
    host_budget_bytes: int | None = None,
    deferred: bool = False,
    each_step: bool = False,
    units: Any = "blocks",
) -> Entry:
    """This project with parameters, master weights and moments in `home`, and gradients on the host or the device.

    Args:
        parameters: elements of the model, by which budgets are set.
        host_budget_bytes: None: all of the model fits.
        deferred: the model is never whole in memory; its initial values are others than plain PyTorch's.
        each_step: it reports on each step.
        units: `paramserver.units`.
    """
    fits = max(_LEAST_HOST_BYTES, parameters * _HOST_BYTES_PER_PARAMETER)

    def config(directory: Path) -> Mapping[str, Any]:
        return task.deepspeed_config() | {
            "steps_per_print": None,
            "paramserver": {
                "job": "benchmark",
                "state_dir": str(directory / "state"),
                "placement": {
                    "parameters": home,
                    "gradients": "device" if home == "device" else "host",
                    "optimizer": home,
                },
                "durability": durability,
                "host_budget": fits if host_budget_bytes is None else host_budget_bytes,
                "nvme_budget": max(_LEAST_NVME_BYTES, parameters * _NVME_BYTES_PER_PARAMETER),
                "units": units,
            },
        }

    probed = home == "nvme" or durability == "step"
    return Entry(name=name, kind="ours", config_in=config, deferred=deferred, each_step=each_step, probed=probed)


def deepspeed(
    name: str, task: TrainingTask, parameters: int, home: Literal["cpu", "nvme"], environment: DeepSpeedEnvironment
) -> Entry:
    """DeepSpeed's ZeRO-3 with parameters and optimizer states in `home`, with what made it fastest here."""

    def config(directory: Path) -> Mapping[str, Any]:
        values = task.deepspeed_config()
        if environment.adam_problem is not None:
            values["optimizer"]["params"]["torch_adam"] = True
        offload = {"device": home, "pin_memory": False} | ({"nvme_path": str(directory)} if home == "nvme" else {})
        pipelined = {"pipeline_read": True, "pipeline_write": True} if home == "nvme" else {}
        buffers = {"buffer_size": max(_LEAST_BUFFER_ELEMENTS, task.largest_parameter)} if home == "nvme" else {}
        values["zero_optimization"] |= {"offload_param": offload | buffers, "offload_optimizer": offload | pipelined}
        return values | {"aio": _AIO, "steps_per_print": 1_000_000}

    return Entry(
        name=name,
        kind="deepspeed",
        config_in=config,
        python=environment.python,
        environment=environment.variables,
        optional=True,
        probed=home == "nvme",
    )
