"""A real pass is timed where the machine has room for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from trainer_client.errors import ConfigError
from trainer_client.plan.model_inputs import make_batch
from trainer_client.plan.real_pass import RealPass, can_be_real, pass_seconds, time_passes
from trainer_client.plan.rehearsal import Rehearsal, rehearse

SAMPLES, TOKENS, WIDTH = 2, 8, 32


class Words(nn.Module):
    """A language model of one layer, which returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embedding(input_ids)).flatten(0, 1).float(), labels.flatten())


def rehearsed() -> Rehearsal:
    return rehearse(Words, lambda model: make_batch(model, None)(SAMPLES, TOKENS), None)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_pass_takes_time_and_keeps_no_gradient(dtype: torch.dtype | None) -> None:
    source = f"{Path(__file__).stem}:Words" if __name__ == Path(__file__).stem else f"{__name__}:Words"

    assert pass_seconds(RealPass(source=source, inputs=None, samples=SAMPLES, tokens=TOKENS, dtype=dtype)) > 0


class Turned(nn.Module):
    """A linear layer behind a rotation by a complex buffer, for floating-point inputs."""

    turn: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH / 2)))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(hidden.float().unflatten(-1, (-1, 2))) * self.turn
        return self.layer(torch.view_as_real(pairs).flatten(-2).to(hidden.dtype)).square().mean()


def test_a_pass_in_another_dtype_leaves_complex_buffers_as_they_are() -> None:
    assert time_passes(Turned(), {"hidden": torch.ones(SAMPLES, WIDTH)}, torch.bfloat16) > 0


def test_what_is_too_large_is_not_run() -> None:
    found = rehearsed()
    needed = found.peak_bytes_without_gradients() + 1000

    assert can_be_real(found, 1000, 4 * needed, ranks=1)
    assert not can_be_real(found, 1000, 4 * needed, ranks=2)
    assert not can_be_real(found, 1001, 4 * needed, ranks=1)


def test_tokens_are_those_of_the_vocabulary() -> None:
    model = Words()
    model.config = type("Config", (), {"vocab_size": 5})()

    assert make_batch(model, None)(1, 7)["input_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    with pytest.raises(ConfigError, match="give --inputs MODULE:CALLABLE"):
        make_batch(nn.Linear(1, 1), None)
