"""DeepSpeed's `deepspeed.comm`: the names of torch.distributed, and `init_distributed`, which joins the process group.

This module owns how a process finds the other ranks of its run. A process that no launcher has started is a run of one
rank: the first collective makes a group for it. This module must never discover ranks in another way than the
environment variables of torchrun, because every rank has to find the same run.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ReduceOp  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from trainer_client.base.device import CPU, backend_of, in_use, kind_in_use
from trainer_client.errors import ConfigError

__all__ = [
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_PORT = 29500
_NCCL = "nccl"
# The environment variable with which gloo connects two ranks when they first exchange something. Without it, gloo
# connects each rank with all others when a group is made. See `lazily_connected`.
_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
# The environment variable in which DeepSpeed's users write a longer time-out of collectives, in minutes.
_TIMEOUT_VARIABLE = "DEEPSPEED_TIMEOUT"

# The environment variables that MPI launchers and Slurm set: the one with the number of processes, and those with the
# rank and the local rank.
_FOREIGN_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MV2_COMM_WORLD_SIZE": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "PMI_SIZE": ("PMI_RANK", "MPI_LOCALRANKID"),
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID", "SLURM_LOCALID"),
}
# Backends of DeepSpeed that are refused, because torch does not have them, or because no collective of this library
# runs on them.
_FOREIGN_BACKENDS = frozenset({"ccl", "hccl", "mpi", "mscclpp"})
# The functions of DeepSpeed's log of communication. This module has none of them, so their use raises an error with the
# remedy.
_LOG_OF_COMMUNICATION = frozenset(
    {"configure", "get_comm_operation_count", "get_logged_comm_ops", "has_comm_data", "log_summary", "reset_log"}
)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of this run, unless torch.distributed is initialised already. All ranks must call this.

    The ranks are those that the environment names (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, as torchrun sets them),
    or those that `init_method`, `rank` and `world_size` name. Without either, this process is a run of one rank.

    Args:
        dist_backend: a backend of torch.distributed; None: NCCL for tensors on GPUs, the backend of another
            accelerator for tensors there, and gloo for all others. "nccl" means the same, because this library also
            exchanges tensors in host memory.
        auto_mpi_discovery: has no effect: processes of an MPI launcher are refused, whatever its value, because ranks
            that find each other in two ways may find two different runs.
        distributed_port: the port of rank 0, if the environment has no MASTER_PORT.
        verbose: whether rank 0 writes a line to the log.
        timeout: the time limit of each collective; None: $DEEPSPEED_TIMEOUT minutes, or torch's default. The engine's
            own collectives have `paramserver.collective_timeout_seconds` instead.
        init_method: a URL as in torch.distributed.init_process_group.
        dist_init_required: False: the caller says that torch.distributed is initialised already.
        config: has no effect; in DeepSpeed it configures a log of communication.
        rank, world_size: this rank and the number of ranks, for `init_method`.

    Raises:
        ConfigError: the backend is not honoured, the launcher is not torchrun's kind, or `dist_init_required` is False
            and torch.distributed is not initialised.
    """
    if dist.is_initialized():
        log.debug("torch.distributed is initialised already, with %d ranks", dist.get_world_size())
        return
    if dist_init_required is False:
        raise ConfigError("dist_init_required=False, but torch.distributed is not initialised: initialise it first")
    backend = _backend(dist_backend)
    timeout = _default_timeout() if timeout is None else timeout
    with lazily_connected():
        _join(backend, distributed_port, timeout, init_method, rank, world_size)
    if verbose and dist.get_rank() == 0:
        log.info("torch.distributed is initialised: %d ranks, backend %s", dist.get_world_size(), backend)


def join_if_possible(*, port: int = DEFAULT_PORT, required: bool | None = None, verbose: bool = True) -> None:
    """Join the process group of this run as `init_distributed` does. Go on without one where it cannot be made.

    A process that is alone makes a group of one rank with gloo, which needs the loopback interface. A namespace without
    a network has no such interface. The group is for programs that communicate within it, such as the Trainer of
    transformers; an engine needs none.

    Args:
        port: the port of rank 0, if the environment has no MASTER_PORT.
        required: True: a group that cannot be made is an error; None: it is only logged if this process is alone;
            False: the caller says that there is a group already.
        verbose: whether rank 0 writes a line to the log.

    Raises:
        ConfigError: what `init_distributed` raises.
        RuntimeError: the group of a launched rank, or one that is required, cannot be made.
    """
    try:
        init_distributed(distributed_port=port, dist_init_required=required, verbose=verbose)
    except RuntimeError as error:
        if "RANK" in os.environ or required:
            raise
        reason = str(error).partition("\n")[0]
        log.warning("this process makes no process group of one rank, which some programs need: %s", reason)


def _join(
    backend: str, port: int, timeout: timedelta | None, init_method: str | None, rank: int, world_size: int
) -> None:
    """Join the process group of the ranks that `init_method` names, else of those that the environment names.

    If neither names ranks, make a group of this process alone.
    """
    if init_method is not None or rank >= 0:
        dist.init_process_group(
            backend,
            init_method=init_method,
            timeout=timeout,
            rank=rank,
            world_size=world_size,
            device_id=_bound_device(backend),
        )
    elif "RANK" in os.environ:
        _join_launched(backend, port, timeout)
    else:
        _refuse_foreign_launcher()
        # The group of a single rank uses torch's HashStore, which needs no port, so several such processes can run on
        # one machine.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


@contextmanager
def environment_default(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while the context lasts, unless the user has set it.

    torch reads such a variable when a process group is made. The variable is removed again, so that it does not change
    the user's own groups.
    """
    is_set = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]


def lazily_connected() -> AbstractContextManager[None]:
    """Have the gloo groups that are made in this context connect two ranks only when they exchange something.

    Without lazy connections, each rank opens a socket to every other one for each group, and tells all of them its
    addresses through the key-value store. For R ranks that is a number of bytes that grows with R^3: 19.5 MB for the
    groups of 128 ranks. The collectives of an engine are rings and trees, so a rank then has some log2(R) sockets a
    group instead of R - 1 (tests/integration/test_many_ranks.py).
    """
    return environment_default(_LAZY_VARIABLE, "1")


def contradiction(world_size: int, environ: Mapping[str, str]) -> str | None:
    """Return why a process group contradicts the launcher; None if it does not.

    For example, if each of several launched processes has a group of one rank, every process would train the whole
    model on its own.

    Args:
        world_size: the number of ranks in the group.
        environ: the environment, whose WORLD_SIZE is what the launcher has started.
    """
    launched = environ.get("WORLD_SIZE") or "1"
    if world_size != 1 or not launched.isdecimal() or int(launched) <= 1:
        return None
    return (
        f"WORLD_SIZE={launched}, but the process group of torch.distributed has one rank: call init_distributed() on "
        "every rank before anything makes a process group, or unset WORLD_SIZE for runs of one rank"
    )


def require_launched_group() -> None:
    """Raise ConfigError if the process group, if there is one, contradicts the launcher."""
    if dist.is_initialized() and (problem := contradiction(dist.get_world_size(), os.environ)):
        raise ConfigError(problem)


def _join_launched(backend: str, port: int, timeout: timedelta | None) -> None:
    """Join the process group of the ranks that the environment names, as torchrun sets its variables.

    If a variable is missing, the value for a run on one node is used.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ and "WORLD_SIZE" in os.environ:
        # All variables that torch needs are set, so torch reads them itself. torchrun requires this for ranks that it
        # restarts.
        at: tuple[Any, ...] = ("env://",)
    else:
        master = f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', port)}"
        at = (f"tcp://{master}", int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1")))
    waits = default_pg_timeout if timeout is None else timeout
    store, rank, world_size = next(rendezvous(*at, timeout=waits))
    store.set_timeout(waits)
    _launched_stores.append(store)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"paramserver {len(_launched_stores)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=_bound_device(backend),
    )


# torch's key-value stores, one for each process group that this process has joined as the launcher says. They are kept
# until the process ends, because a rank may join the next group, at the same port, before rank 0 has left the last
# group. If rank 0 freed its last store, that rank could be connected to the freed store, while rank 0 waits for that
# rank in a new store without end (tests/integration/test_rejoining.py). The names of each group have their own prefix
# in the store.
_launched_stores: list[Any] = []


def never_free(kept: object) -> None:
    """Keep an object of torch.distributed alive until this process has ended, because a forked child cannot free it.

    To free it, torch waits for threads which the child lacks. A child that ends as a script does, and not by os._exit
    as workers do, would end with SIGSEGV (tests/integration/test_forks.py).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _keep_stores_in_child() -> None:
    for store in _launched_stores:
        never_free(store)


os.register_at_fork(after_in_child=_keep_stores_in_child)


def _backend(name: str | None) -> str:
    """Return the backend for torch.distributed.init_process_group, given DeepSpeed's argument `dist_backend`.

    Raises:
        ConfigError: this library does not honour that backend.
    """
    if name in _FOREIGN_BACKENDS:
        raise ConfigError(f"dist_backend={name!r} is not honoured: write 'nccl' or 'gloo', or leave it out")
    if name not in (None, "nccl"):
        return str(name)
    kind = kind_in_use()
    if kind != CPU:
        return f"cpu:gloo,{kind}:{backend_of(kind)}"
    if name == "nccl":
        raise ConfigError("dist_backend='nccl', and this run uses no GPU: write 'gloo', or leave it out")
    return "gloo"


def _bound_device(backend: str) -> torch.device | None:
    """Return the device of all NCCL communicators of this rank; None without NCCL, or before a device is chosen.

    Without a bound device, NCCL guesses the device in barriers, and torch warns of that.
    """
    return in_use() if _NCCL in backend else None


def _default_timeout() -> timedelta | None:
    """Return the time-out of collectives in $DEEPSPEED_TIMEOUT; None, for torch's default, if it is not set."""
    minutes = os.environ.get(_TIMEOUT_VARIABLE)
    return timedelta(minutes=int(minutes)) if minutes else None


def _refuse_foreign_launcher() -> None:
    """Raise ConfigError if an MPI launcher or Slurm has started this process as one of several."""
    for size, (rank, local_rank) in _FOREIGN_LAUNCHERS.items():
        if int(os.environ.get(size, "1")) > 1:
            raise ConfigError(
                f"{size} = {os.environ[size]}, and RANK is not set: ranks of MPI launchers and of Slurm are not "
                "discovered here. Start the script with torchrun, or set in each process, before Python starts: "
                f"RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} MASTER_ADDR=<host of rank 0> "
                f"MASTER_PORT={DEFAULT_PORT}"
            )


def _require_group() -> None:
    """Make a process group if this process is a run of one rank and has none.

    Raises:
        RuntimeError: a launcher has started several ranks, and they have not joined their group.
    """
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        raise RuntimeError(
            "torch.distributed is not initialised: call init_distributed() or initialize() first, on every rank"
        )
    init_distributed(verbose=False)


def _within_group(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function of torch.distributed so that it also works in a process that no launcher has started.

    The wrapper makes a process group of one rank first, if there is none.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        _require_group()
        return function(*args, **kwargs)

    return call


all_gather = _within_group(dist.all_gather)
all_gather_object = _within_group(dist.all_gather_object)
all_reduce = _within_group(dist.all_reduce)
all_to_all = _within_group(dist.all_to_all)
barrier = _within_group(dist.barrier)
broadcast = _within_group(dist.broadcast)
broadcast_object_list = _within_group(dist.broadcast_object_list)
gather = _within_group(dist.gather)
irecv = _within_group(dist.irecv)
isend = _within_group(dist.isend)
monitored_barrier = _within_group(dist.monitored_barrier)
new_group = _within_group(dist.new_group)
recv = _within_group(dist.recv)
reduce = _within_group(dist.reduce)
reduce_scatter = _within_group(dist.reduce_scatter)
scatter = _within_group(dist.scatter)
send = _within_group(dist.send)
# DeepSpeed's inference engine has a kernel of its own for `inference_all_reduce`, whose result is that of `all_reduce`.
inference_all_reduce = all_reduce


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> dist.Work | None:
    """Gather every rank's `tensor` into `output_tensor`, one after the other. All ranks must call this.

    Returns:
        The pending work if `async_op`; else None, when the collective is done.
    """
    _require_group()
    work: dist.Work | None = _all_gather(output_tensor, tensor, group=group, async_op=async_op)
    return work


def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce `tensor` over the ranks, and give each rank its part in `output_tensor`. All ranks must call this.

    Returns:
        The pending work if `async_op`; else None, when the collective is done.
    """
    _require_group()
    work: dist.Work | None = _reduce_scatter(output_tensor, tensor, op=op, group=group, async_op=async_op)
    return work


def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Send a part of `tensor` to each rank, and receive a part of `output` from each. All ranks must call this.

    Returns:
        The pending work if `async_op`; else None, when the collective is done.
    """
    _require_group()
    sizes = (output_split_sizes, input_split_sizes)
    work: dist.Work | None = dist.all_to_all_single(output, tensor, *sizes, group=group, async_op=async_op)
    return work


# torch 2.13 has the new names all_gather_single and reduce_scatter_single and warns about the old ones; earlier
# versions of torch have only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# DeepSpeed's names for the functions that gather into one tensor and that reduce and scatter one tensor.
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor


def has_all_gather_into_tensor() -> bool:
    """Return True, because every version of torch that this library runs on has this function."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True, because every version of torch that this library runs on has this function."""
    return True


def is_available() -> bool:
    """Return whether this build of torch has torch.distributed."""
    return dist.is_available()


def is_initialized() -> bool:
    """Return whether torch.distributed is initialised."""
    return dist.is_initialized()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Leave a process group, or all groups if `group` is None."""
    dist.destroy_process_group(group)


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's number in the group, by default among all ranks of the run; -1 if it is not in the group."""
    return dist.get_rank(group) if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks of the group, by default of the run; -1 if this rank is not in the group."""
    return dist.get_world_size(group) if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank() -> int:
    """Return the number of this rank on its node, which is that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the number in the run of the rank that has number `group_rank` in the group."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the numbers in the run of the group's ranks, by default of all ranks."""
    return list(range(get_world_size())) if group is None else dist.get_process_group_ranks(group)


def get_world_group() -> ProcessGroup:
    """Return the group of all ranks of the run."""
    _require_group()
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    return world


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return a mesh over all ranks. All ranks must call this."""
    _require_group()
    return init_device_mesh(kind_in_use(), tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def __getattr__(name: str) -> Any:
    if name in _LOG_OF_COMMUNICATION:
        raise AttributeError(
            f"comm.{name} belongs to DeepSpeed's log of communication, which is not built here: engine.step_report() "
            "says how long each step waited for other ranks"
        )
    if hasattr(dist, name):
        raise AttributeError(f"comm has no {name}: use torch.distributed.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
