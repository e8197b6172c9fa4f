"""Random numbers are settled when a kernel is submitted, and their state can be kept and set."""

from __future__ import annotations

import torch

from tests.device import lag

DEVICE = torch.device("lag", 0)


def draws() -> list[torch.Tensor]:
    kept = torch.nn.functional.dropout(torch.ones(1000, device=DEVICE), 0.25)
    return [torch.rand(10, device=DEVICE), torch.randn(10, device=DEVICE), kept, torch.randperm(20, device=DEVICE)]


def test_a_seed_gives_the_same_numbers_under_each_lag() -> None:
    seen = []
    for schedule in lag.SCHEDULES.values():
        schedule.use()
        torch.manual_seed(5)
        seen.append([drawn.cpu() for drawn in draws()])
    for later in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(later, seen[0], strict=True))
    torch.manual_seed(6)
    assert not torch.equal(draws()[0].cpu(), seen[0][0])


def test_a_state_that_is_set_again_repeats_the_numbers() -> None:
    module = torch.get_device_module(DEVICE)
    torch.rand(3, device=DEVICE)
    state = module.get_rng_state(DEVICE)
    other = module.get_rng_state("lag:1")
    first = torch.rand(5, device=DEVICE).tolist()
    assert torch.rand(5, device=DEVICE).tolist() != first
    module.set_rng_state(state, DEVICE)
    assert torch.rand(5, device=DEVICE).tolist() == first
    assert torch.equal(module.get_rng_state("lag:1"), other)


def test_dropout_keeps_its_share_and_scales_it_forwards_and_backwards() -> None:
    values = torch.ones(20_000, device=DEVICE, requires_grad=True)
    kept = torch.nn.functional.dropout(values, 0.25)
    kept.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad.cpu(), kept.detach().cpu())
    assert set(kept.detach().unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((kept > 0).float().mean().item() - 0.75) < 0.02


def test_a_generator_of_ones_own_draws_its_own_numbers() -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(9)
    first = torch.rand(4, device=DEVICE, generator=generator).tolist()
    generator.manual_seed(9)
    torch.rand(4, device=DEVICE)
    assert torch.rand(4, device=DEVICE, generator=generator).tolist() == first


def test_the_generator_of_the_cpu_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    draws()
    torch.accelerator.synchronize()
    assert torch.equal(torch.get_rng_state(), before)
