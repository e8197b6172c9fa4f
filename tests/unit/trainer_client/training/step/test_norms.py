"""An exact norm has the bits of torch's, whatever memory it is computed in; an inexact norm has nearly its value."""

from __future__ import annotations

import pytest
import torch

from trainer_client.training.step import norms as norms_module
from trainer_client.training.step.norms import Norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_that_of_the_fp32_values(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_module, "MOST_KEPT_ELEMENTS", 300_000)
    kept, generator = Norms(), torch.Generator().manual_seed(3)
    # The sizes grow and shrink, exceed the memory that is kept between two calls, and end with an empty gradient.
    for numel in (5, 100_003, 17, 300_000, 300_001, 1 << 20, 4096, 0):
        values = torch.randn(numel, generator=generator).to(dtype)
        assert torch.equal(kept.of(values), torch.linalg.vector_norm(values.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e4])
def test_one_that_nothing_depends_on_is_right_within_a_thousandth(dtype: torch.dtype, scale: float) -> None:
    norms, generator = Norms(exact=False), torch.Generator().manual_seed(5)
    least = norms_module.LEAST_ROWS * norms_module.ROW_ELEMENTS
    for numel in (0, 5, least - 1, least, least + 1, 1 << 20):
        values = (torch.randn(numel, generator=generator) * scale).to(dtype)
        wanted = torch.linalg.vector_norm(values.double()).item()
        norm = norms.of(values)
        assert norm.dtype == torch.float32 and norm.shape == ()
        assert norm.item() == pytest.approx(wanted, rel=1e-3, abs=1e-22)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [777, (1 << 17) - 1, 1 << 17])
def test_what_is_not_finite_shows(wrong: float, place: int, exact: bool) -> None:
    norms, values = Norms(exact=exact), torch.ones((1 << 17) + 1, dtype=torch.bfloat16)
    values[place] = wrong
    assert not norms.of(values).isfinite()
    assert norms.of(torch.ones_like(values)).isfinite(), "nothing of it stays"


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_it_does_not_depend_on_the_default_dtype_of_the_script(default: torch.dtype) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(7)).half()
    expected = torch.linalg.vector_norm(values.float())
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        norm = Norms().of(values)
    finally:
        torch.set_default_dtype(before)

    assert norm.dtype == torch.float32 and torch.equal(norm, expected)
