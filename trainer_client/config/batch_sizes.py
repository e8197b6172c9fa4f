"""The keys of the batch sizes, and the sizes that follow from them and the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, PositiveInt

from trainer_client.base.section import Section
from trainer_client.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """DeepSpeed's three batch sizes, for which `train = micro * accumulation * world size` holds."""

    train: int
    micro: int
    accumulation: int


class BatchKeys(Section):
    """The keys of the config that say how many samples a step has, and how they are divided."""

    train_batch_size: PositiveInt | None = Field(
        default=None,
        description="micro batch * accumulation * world size; give any one of the first two, or more if they agree",
    )
    train_micro_batch_size_per_gpu: PositiveInt | None = Field(
        default=None, description="samples per rank and micro-batch"
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        default=None, description="micro-batches per step; null: what follows from the other two, else 1"
    )
    managed_gradient_accumulation: bool = Field(
        default=True,
        description="the engine counts the micro-batches of a step; false: each call of step() makes a step of the "
        "backward passes since the last one",
    )
    dataloader_drop_last: bool = Field(
        default=False,
        description="leave out the samples of `training_data` that do not fill a last step; false: it is filled up "
        "with the epoch's first samples",
    )


def resolve_batch_sizes(config: BatchKeys, world_size: int) -> BatchSizes:
    """Return DeepSpeed's three batch sizes.

    The micro or the train batch size alone, or any two of the three, determine the others.

    Raises:
        ConfigError: the given sizes contradict each other, or both the micro and the train batch size are missing.
    """
    train = config.train_batch_size
    micro = config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    if micro is None and train is None:
        raise ConfigError("write train_batch_size or train_micro_batch_size_per_gpu: neither is there")
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    if train != micro * accumulation * world_size or not micro or not accumulation:
        raise ConfigError(
            f"train_batch_size = {train} is not train_micro_batch_size_per_gpu * gradient_accumulation_steps * "
            f"world size = {micro} * {accumulation} * {world_size}: change one of them, or leave one out"
        )
    return BatchSizes(train=train, micro=micro, accumulation=accumulation)
