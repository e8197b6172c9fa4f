"""The checks of the process groups that DeepSpeed's arguments can name: each must have all ranks of the run.

This module owns the checks. The library has data parallelism over all ranks and no other kind of parallelism, so a
group of fewer ranks is refused.
"""

from __future__ import annotations

from typing import Any

from trainer_client import comm
from trainer_client.errors import ConfigError

# The methods of an `mpu` (Megatron's model-parallel unit) that return over how many ranks it splits the model, the
# sequence or the context. None of them may return more than 1, because ranks split only the data here.
_OTHER_SIZES = (
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_pipe_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_context_parallel_world_size",
)


def check_group(argument: str, group: Any) -> None:
    """Check that a process group has all ranks of the run. None counts as all ranks.

    Args:
        argument: the name of the argument that has the group, for the message.

    Raises:
        ConfigError: the group lacks some ranks.
    """
    if group is not None and (size := comm.get_world_size(group)) != comm.get_world_size():
        raise ConfigError(
            f"{argument} has {size} of the {comm.get_world_size()} ranks: parameters are divided among all ranks of a "
            "run here; leave the argument out"
        )


def check_mpu(argument: str, mpu: Any) -> None:
    """Check that a model-parallel unit of Megatron's kind splits nothing but the data. None splits nothing.

    Args:
        argument: the name of the argument that has the unit, for the message.

    Raises:
        ConfigError: the unit splits the model, the sequence or the context, or its group lacks some ranks.
    """
    for name in _OTHER_SIZES:
        size = getattr(mpu, name, None)
        if callable(size) and size() > 1:
            raise ConfigError(f"{argument}: {name}() is {size()}, and there is data parallelism only (ZeRO): use 1")
    group = getattr(mpu, "get_data_parallel_group", None)
    if callable(group):
        check_group(f"{argument}: get_data_parallel_group()", group())
