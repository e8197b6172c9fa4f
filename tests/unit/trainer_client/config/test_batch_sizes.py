"""DeepSpeed's three batch sizes complete each other, or are refused where they contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.config.batch_sizes import resolve_batch_sizes
from trainer_client.config.loading import load_config
from trainer_client.errors import ConfigError


def config(**sizes: int | None) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, **sizes}


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "expected"),
    [
        (None, 4, None, (8, 4, 1)),
        (None, 4, 3, (24, 4, 3)),
        (16, None, None, (16, 8, 1)),
        (16, None, 2, (16, 4, 2)),
        (16, 4, None, (16, 4, 2)),
        (16, 4, 2, (16, 4, 2)),
    ],
)
def test_batch_sizes_complete_each_other(
    train: int | None, micro: int | None, accumulation: int | None, expected: tuple[int, int, int]
) -> None:
    loaded = load_config(
        config(train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation),
        {},
    )

    sizes = resolve_batch_sizes(loaded, world_size=2)

    assert (sizes.train, sizes.micro, sizes.accumulation) == expected


@pytest.mark.parametrize(
    ("train", "micro", "accumulation"), [(16, 4, 3), (15, 4, None), (None, None, 2), (1, None, None)]
)
def test_batch_sizes_that_do_not_agree_are_refused(
    train: int | None, micro: int | None, accumulation: int | None
) -> None:
    loaded = load_config(
        config(train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation),
        {},
    )

    with pytest.raises(ConfigError, match="train_batch_size"):
        resolve_batch_sizes(loaded, world_size=2)
