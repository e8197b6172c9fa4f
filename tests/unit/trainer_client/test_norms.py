"""The norm is torch's, bit for bit, whatever memory it is taken in."""

from __future__ import annotations

import pytest
import torch

from trainer_client.step import norms
from trainer_client.step.norms import Norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_that_of_the_fp32_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "MOST_KEPT_ELEMENTS", 300_000)
    kept, generator = Norms(), torch.Generator().manual_seed(3)
    # Growing, shrinking, too large to be kept, nothing.
    for numel in (5, 100_003, 17, 300_000, 300_001, 1 << 20, 4096, 0):
        values = torch.randn(numel, generator=generator).to(dtype)
        assert torch.equal(kept.of(values), torch.linalg.vector_norm(values.float()))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(wrong: float) -> None:
    kept, values = Norms(), torch.ones(1000, dtype=torch.bfloat16)
    values[777] = wrong
    assert not kept.of(values).isfinite()
    assert kept.of(torch.ones(1000, dtype=torch.bfloat16)).isfinite(), "nothing of it stays"
