"""The options of DeepSpeed's and Accelerate's launchers that `paramserver launch` refuses, with what to write instead.

If an option of those launchers means the same as an option of `paramserver launch`, cli.py has it as an alias. This
module owns the texts that say what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping

_EACH_NODE = (
    "start the command on each node (by srun, mpirun or ssh), with --nnodes, --node-rank and --master-addr, or with "
    "--nnodes and one --rdzv-endpoint HOST:PORT for all"
)
_DEVICES = "set CUDA_VISIBLE_DEVICES on each node, and --nproc-per-node to their number"
_IN_CONFIG = "write it in the training config, which the script passes to initialize()"
_AS_DEEPSPEED = "give --as-deepspeed, and pass the config to the script as it expects it"

_INSTEAD: Mapping[str, str] = {
    "hostfile": _EACH_NODE,
    "launcher": _EACH_NODE,
    "launcher-args": _EACH_NODE,
    "ssh-port": _EACH_NODE,
    "force-multi": _EACH_NODE,
    "deepspeed-hostfile": _EACH_NODE,
    "deepspeed-multinode-launcher": _EACH_NODE,
    "include": _DEVICES,
    "exclude": _DEVICES,
    "deepspeed-inclusion-filter": _DEVICES,
    "deepspeed-exclusion-filter": _DEVICES,
    "gpu-ids": _DEVICES,
    "bind-cores-to-rank": "set OMP_NUM_THREADS, or start the command under numactl or taskset",
    "bind-core-list": "set OMP_NUM_THREADS, or start the command under numactl or taskset",
    "config-file": "give the options on the command line: there is no file of launch settings",
    "use-deepspeed": _AS_DEEPSPEED,
    "deepspeed-config-file": _AS_DEEPSPEED,
    "zero-stage": _IN_CONFIG,
    "offload-optimizer-device": _IN_CONFIG,
    "offload-param-device": _IN_CONFIG,
    "gradient-accumulation-steps": _IN_CONFIG,
    "gradient-clipping": _IN_CONFIG,
    "mixed-precision": _IN_CONFIG,
    "use-fsdp": "remove it: sharding is zero_optimization.stage of the training config",
    "multi-gpu": "remove it: --nproc-per-node is the number of GPUs of the node without it",
    "cpu": "set CUDA_VISIBLE_DEVICES to an empty value",
    "autotuning": "run `paramserver plan`, which prints a config for the machine",
    "elastic-training": "give --nnodes, and start the job again when that changes: it resumes with any number of ranks",
    "enable-each-rank-log": "give --log-dir",
    "save-pid": "remove it: the pid of the command is that of the shell's job",
}


def instead_of(option: str) -> str | None:
    """Return what to write instead of another launcher's option (`--hostfile`); None for an unknown option."""
    return _INSTEAD.get(option.lstrip("-").replace("_", "-"))
