"""Operators give the CPU's values, with gradients, while everything is late; the CPU is the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.device import lag

# Each takes a device and returns tensors on it. Values are made on the CPU, because the device draws others.
Program = Callable[[torch.device], tuple[torch.Tensor, ...]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def values(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def trained(module: nn.Module, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    output.float().square().mean().backward()
    return (output.detach(), *(p.grad for p in module.parameters() if p.grad is not None))


def made(module: nn.Module, device: torch.device) -> nn.Module:
    for index, parameter in enumerate(module.parameters()):
        parameter.data.copy_(values(torch.device("cpu"), *parameter.shape) / (index + 2))
    return module.to(device)


@program
def perceptron_with_layer_norm(device: torch.device) -> tuple[torch.Tensor, ...]:
    module = made(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)), device)
    return trained(module, module(values(device, 5, 6)))


@program
def perceptron_in_bf16(device: torch.device) -> tuple[torch.Tensor, ...]:
    module = made(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3)), device)
    module.to(torch.bfloat16)
    return trained(module, module(values(device, 5, 6, dtype=torch.bfloat16)))


@program
def convolutions_with_other_norms(device: torch.device) -> tuple[torch.Tensor, ...]:
    module = made(nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.MaxPool2d(2)), device)
    return trained(module, module(values(device, 2, 2, 8, 8)))


@program
def attention(device: torch.device) -> tuple[torch.Tensor, ...]:
    query = values(device, 2, 3, 5, 4).requires_grad_()
    functional.scaled_dot_product_attention(query, query, query, is_causal=True).square().sum().backward()
    assert query.grad is not None
    return (query.grad,)


@program
def embeddings_that_are_tied(device: torch.device) -> tuple[torch.Tensor, ...]:
    embedding = made(nn.Embedding(11, 4), device)
    tokens = torch.tensor([[1, 2, 2], [0, 10, 1]], device=device)
    return trained(embedding, embedding(tokens) @ embedding.weight.T)


@program
def losses(device: torch.device) -> tuple[torch.Tensor, ...]:
    logits = values(device, 4, 5).requires_grad_()
    labels = torch.tensor([1, -100, 0, 4], device=device)
    found = [
        functional.cross_entropy(logits, labels),
        functional.mse_loss(logits, torch.zeros_like(logits)),
        functional.smooth_l1_loss(logits, torch.zeros_like(logits)),
        functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)),
        functional.kl_div(logits.log_softmax(1), torch.full_like(logits, 0.2), reduction="batchmean"),
    ]
    torch.stack(found).sum().backward()
    assert logits.grad is not None
    return (torch.stack(found).detach(), logits.grad)


@program
def reductions_and_sorting(device: torch.device) -> tuple[torch.Tensor, ...]:
    x = values(device, 6, 7)
    largest, where = x.topk(3, dim=1)
    return (
        x.sum(0),
        x.mean(),
        x.var(1),
        x.amax(1),
        x.argmax(1),
        largest,
        where,
        x.sort(0).values,
        x.cumsum(1),
        x.norm(),
    )


@program
def shapes_that_depend_on_values(device: torch.device) -> tuple[torch.Tensor, ...]:
    x = values(device, 6, 7)
    return (x[x > 0], x.nonzero(), torch.unique(x.round()), x.masked_select(x < 0), torch.bincount(x.abs().long()[0]))


@program
def indexed_writes(device: torch.device) -> tuple[torch.Tensor, ...]:
    x, rows = values(device, 6, 7), torch.tensor([0, 2, 2], device=device)
    y = x.clone()
    y[1:3] = 7
    y[rows[:2], 3] = -1.0
    return (
        y,
        x.index_add(0, rows, torch.ones(3, 7, device=device)),
        x.scatter(1, rows.expand(6, 3), 0.5),
        x.gather(1, rows.expand(6, 3)),
        x.masked_fill(x > 0, 0),
        torch.where(x > 0, x, -x),
    )


@program
def views_and_joins(device: torch.device) -> tuple[torch.Tensor, ...]:
    x = values(device, 4, 6)
    return (
        torch.cat([x, x.flip(0)]),
        torch.stack(x.split(2, dim=1)),
        x.T.reshape(3, 8),
        x.unfold(1, 2, 2),
        x.view(torch.int32) & 1,
        torch.einsum("ij,kj->ik", x, x),
        x.roll(1, 0).tril(),
    )


@program
def arguments_for_outputs(device: torch.device) -> tuple[torch.Tensor, ...]:
    x = values(device, 4, 4)
    total, product = torch.empty(0, device=device), torch.empty(4, 4, device=device)
    torch.sum(x, dim=0, out=total.resize_(4))
    torch.mm(x, x, out=product)
    return (total, product, x.clone().addmm_(x, x), x.clone().clamp_(-0.5, 0.5))


@program
def many_tensors_at_once(device: torch.device) -> tuple[torch.Tensor, ...]:
    parameters = [nn.Parameter(values(device, 3, size)) for size in (2, 5)]
    for parameter in parameters:
        parameter.grad = parameter.detach() * 2
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    for optimizer in (
        torch.optim.AdamW(parameters, lr=0.1, fused=True),
        torch.optim.AdamW(parameters, lr=0.1, foreach=True),
        torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        torch.optim.Adagrad(parameters, lr=0.1, fused=True),
    ):
        optimizer.step()
        optimizer.step()
    return (norm, *(parameter.detach() for parameter in parameters))


@program
def numbers_and_other_dtypes(device: torch.device) -> tuple[torch.Tensor, ...]:
    x = values(device, 3, 3)
    scale = torch.tensor(3.0)  # a number on the host is an argument of a kernel
    return (
        x * scale,
        x.half() + 1,
        x.double().exp(),
        x.to(torch.int8),
        x.bool().logical_not(),
        torch.arange(3, device=device),
    )


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no complex numbers"):
        torch.ones(2, dtype=torch.complex64, device="lag")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_operator_has_the_values_of_the_cpu(name: str) -> None:
    lag.Schedule(all_ms=3, random_ms=3).use()
    expected = PROGRAMS[name](torch.device("cpu"))
    for actual, wanted in zip(PROGRAMS[name](torch.device("lag", 0)), expected, strict=True):
        assert actual.device.type == "lag"
        torch.testing.assert_close(actual.cpu(), wanted)
