"""DeepSpeed's `deepspeed.utils.groups`: the groups of ranks. Data parallelism is the only kind, over all ranks.

In every other kind of parallelism, such as tensor parallelism, each group has one rank. For these kinds, the functions
that return the process group itself raise an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

from trainer_client import comm
from trainer_client.base.not_built import refuse
from trainer_client.training.data_parallel import check_mpu

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Accept groups of one rank for expert and model parallelism, because there are no others.

    Raises:
        NotBuiltError: `ep_size` is not 1.
        ConfigError: `mpu` describes model parallelism.
    """
    if ep_size != 1:
        refuse(
            f"groups.initialize(ep_size={ep_size})",
            "expert parallelism is not built; use 1: ranks have all experts",
        )
    check_mpu("groups.initialize(mpu=...)", mpu)


def get_data_parallel_group() -> comm.ProcessGroup:
    """Return the group of all ranks."""
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    """Return the number of all ranks."""
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    """Return the number of this rank among all ranks."""
    return comm.get_rank()


def get_model_parallel_world_size() -> int:
    """Return 1, because there is no model parallelism."""
    return 1


def get_model_parallel_rank() -> int:
    """Return 0, because there is no model parallelism."""
    return 0


def get_model_parallel_group() -> NoReturn:
    """Refuse the call, because there is no model parallelism. It raises NotBuiltError."""
    refuse("groups.get_model_parallel_group()", "model parallelism is not built; check get_model_parallel_world_size()")


def get_sequence_parallel_group() -> NoReturn:
    """Refuse the call, because there is no sequence parallelism. It raises NotBuiltError."""
    refuse("groups._get_sequence_parallel_group()", "sequence parallelism is not built; its world size is 1")


# DeepSpeed has these further names for the same groups. The names with an underscore are here because other packages
# call them.
get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size
_get_broadcast_src_rank = get_model_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_parallel_group = get_sequence_parallel_group
_get_sequence_parallel_rank = get_model_parallel_rank
_get_sequence_parallel_world_size = get_model_parallel_world_size
