"""Digests tell whether parameters have other bytes, also where a sum of them is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer_client.training.model import digests
from trainer_client.training.model.digests import digest_on_device, digest_on_host

CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda values: values.neg(),
    lambda values: values.flip(0),
    lambda values: values.roll(4),
    lambda values: torch.cat((values[4:8], values[:4], values[8:])),
    lambda values: torch.cat((values[:-1], torch.zeros(1, dtype=values.dtype))),
    lambda values: torch.cat((values[:-1], -values[-1:])),
    lambda values: torch.cat((values[:1], -values[1:2], values[2:3], -values[3:4], values[4:])),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1003, 16])
@pytest.mark.parametrize("words", [7, 1 << 22])
def test_each_change_has_another_digest(
    dtype: torch.dtype, numel: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator computes on runs of words, the last of which may be no whole word."""
    monkeypatch.setattr(digests, "_WORDS_AT_ONCE", words)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    changed = [values, *(change(values) for change in CHANGES)]

    on_device = {int(digest_on_device(each)) for each in changed}
    on_host = {digest_on_host(memoryview(each.view(torch.uint8).numpy().data), [slice(None)]) for each in changed}

    assert (len(on_device), len(on_host)) == (len(changed), len(changed))
    assert int(digest_on_device(values.clone())) in on_device
