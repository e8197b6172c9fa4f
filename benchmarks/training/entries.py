"""The contestants of the training benchmarks with their configs: this project's placements, and DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.training.contestant_process import RunningContestant
from benchmarks.training.deepspeed_environment import DeepSpeedEnvironment
from benchmarks.training.task import TrainingTask

PLAIN = RunningContestant(name="plain", kind="plain")
COMPUTE = RunningContestant(name="compute", kind="compute")

# The setting of docs/performance.md: malloc maps large blocks, in huge pages, and returns them when they are freed.
TUNED_MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304"}

Home = Literal["device", "host", "nvme"]
Durability = Literal["none", "step"]

# Host memory for two versions of 14 bytes per parameter: 2 in bf16, 12 of fp32 master weight and moments.
_HOST_BYTES_PER_PARAMETER = 28
_LEAST_HOST_BYTES = 64 << 20
# Disk space for two versions, and for fragmentation.
_NVME_BYTES_PER_PARAMETER = 40
_LEAST_NVME_BYTES = 2 << 30

_AIO = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
# The least size of DeepSpeed's buffers, which must be at least as large as the largest parameter.
_LEAST_BUFFER_ELEMENTS = 10_000_000
# In elements.
_LEAST_BUCKETS = {
    "reduce_bucket_size": 5_000_000,
    "stage3_prefetch_bucket_size": 5_000_000,
    "stage3_max_live_parameters": 60_000_000,
}


def ours(
    name: str,
    task: TrainingTask,
    parameters: int,
    home: Home,
    *,
    durability: Durability,
    host_budget_bytes: int | None = None,
    deferred: bool = False,
) -> RunningContestant:
    """Return an entry of this project, with parameters, master weights and moments in `home`.

    Gradients are on the device if `home` is, and otherwise on the host.

    Args:
        parameters: the number of elements of the model, from which the budgets are computed.
        host_budget_bytes: the host budget; None: one in which the whole model fits.
        deferred: see `contestants.Spec`.
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
                "units": "blocks",
            },
        }

    probed = home == "nvme" or durability == "step"
    return RunningContestant(name=name, kind="ours", config_in=config, deferred=deferred, probed=probed)


def deepspeed(
    name: str,
    task: TrainingTask,
    parameters: int,
    home: Literal["cpu", "nvme"],
    environment: DeepSpeedEnvironment,
    *,
    deferred: bool = False,
    frugal: bool = False,
) -> RunningContestant:
    """Return an entry of DeepSpeed's ZeRO-3 with parameters and optimizer states in `home`.

    Its other settings are those with which it was fastest in our measurements, or, with `frugal`, had least memory. On
    an accelerator its host memory is pinned, as its documentation advises. `deferred`: see `contestants.Spec`.
    """
    pinned = environment.device != "cpu"

    def config(directory: Path) -> Mapping[str, Any]:
        values = task.deepspeed_config()
        if environment.adam_problem is not None:
            values["optimizer"]["params"]["torch_adam"] = True
        offload = {"device": home, "pin_memory": pinned} | ({"nvme_path": str(directory)} if home == "nvme" else {})
        pipelined = {"pipeline_read": not frugal, "pipeline_write": not frugal} if home == "nvme" else {}
        largest = max(_LEAST_BUFFER_ELEMENTS, task.largest_parameter)
        buffers = {"buffer_size": largest} if home == "nvme" else {}
        if frugal:
            # A sub-group's states are in host memory at once. By default one has up to 1e9 elements.
            values["zero_optimization"] |= _LEAST_BUCKETS | {"sub_group_size": largest}
            buffers |= {"buffer_count": 3}
        values["zero_optimization"] |= {"offload_param": offload | buffers, "offload_optimizer": offload | pipelined}
        return values | {"aio": _AIO, "steps_per_print": 1_000_000}

    return RunningContestant(
        name=name,
        kind="deepspeed",
        config_in=config,
        deferred=deferred,
        python=environment.python,
        environment=environment.variables,
        optional=True,
        probed=home == "nvme",
    )
