"""bf16 where the processor has no instructions for it: products of matrices are computed in fp32, and rounded.

With AVX2 alone, torch multiplies bf16 matrices three hundred times slower than fp32 ones, so that a step would take an
hour of which this project's part could not be seen. Sums are in fp32 with such instructions, too: the values are as
exact as there. All contestants compute so, forward and backward. Read by DeepSpeed's environment, too.
"""

from __future__ import annotations

import mmap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# What linear layers and experts come to, and the backward of attention; its forward is as fast in bf16.
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def need_fp32() -> bool:
    """Whether this processor has no instructions for bf16."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def precision_in_words() -> str:
    """How the training benchmarks compute."""
    words = "bf16 with fp32 master weights and moments"
    if need_fp32():
        words += " (products of matrices in fp32 and rounded: the processor has no instructions for bf16)"
    return words


@contextmanager
def in_fp32() -> Iterator[None]:
    """While it is open, bf16 matrices on the CPU are multiplied so in this process."""
    library = torch.library.Library("aten", "IMPL")
    workspace = _Workspace()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in PRODUCTS:
            own_into = _own(f"{name}.out")
            library.impl(name, _product(_own(name), own_into, workspace), "CPU", allow_override=True)
            library.impl(f"{name}.out", _product_into(own_into, workspace), "CPU", allow_override=True)
        backward = _attention_backward(_own(ATTENTION_BACKWARD), workspace)
        library.impl(ATTENTION_BACKWARD, backward, "CPU", allow_override=True)
    yield
    # Torch's own come back when this is gone.
    del library


class _Workspace(threading.local):
    """Memory for operands and results in fp32: kept, and not malloc's, where instructions for bf16 would leave no holes
    either, nor take pages of the kernel's each time."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def empty(self, place: int, size: Sequence[int]) -> torch.Tensor:
        """[*size] in fp32; whatever was in `place` before is lost."""
        numel = torch.Size(size).numel()
        if place not in self._kept or self._kept[place].numel() < numel:
            self._kept.pop(place, None)
            pages = mmap.mmap(-1, max(1, numel) * torch.float32.itemsize)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._kept[place] = torch.frombuffer(pages, dtype=torch.float32)
        return self._kept[place][:numel].view(size)

    def widened(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same in fp32, in places 0, 1, ... What is contiguous but for the order of its dimensions stays so: to
        transpose a matrix here would take longer than to copy it."""
        wide = []
        for place, each in enumerate(values):
            order = sorted(range(each.dim()), key=each.stride, reverse=True)
            straight = each.permute(order)
            copy = self.empty(place, straight.size()).copy_(straight)
            wide.append(copy.permute([order.index(dimension) for dimension in range(each.dim())]))
        return wide


def _own(name: str) -> Callable[..., Any]:
    """Torch's own kernel."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return lambda *operands, **options: kernel.call_boxed(keys, *operands, **options)


def _product(own: Callable[..., Any], own_into: Callable[..., Any], workspace: _Workspace) -> Callable[..., Any]:
    def product(*operands: torch.Tensor, **factors: float) -> Any:
        if operands[0].dtype != torch.bfloat16:
            return own(*operands, **factors)
        return _computed(operands, factors, own_into, workspace).to(torch.bfloat16)

    return product


def _product_into(own_into: Callable[..., Any], workspace: _Workspace) -> Callable[..., Any]:
    def product(*operands: torch.Tensor, out: torch.Tensor, **factors: float) -> Any:
        if operands[0].dtype != torch.bfloat16:
            return own_into(*operands, **factors, out=out)
        result = _computed(operands, factors, own_into, workspace)
        return out.resize_(result.size()).copy_(result)

    return product


def _computed(
    operands: Sequence[torch.Tensor], factors: Mapping[str, float], own_into: Callable[..., Any], workspace: _Workspace
) -> torch.Tensor:
    """The product of the last two operands, which a bias may precede, in fp32: until the next one."""
    left, right = operands[-2:]
    result = workspace.empty(len(operands), (*left.shape[:-1], right.shape[-1]))
    own_into(*workspace.widened(operands), **factors, out=result)
    return result


def _attention_backward(own: Callable[..., Any], workspace: _Workspace) -> Callable[..., Any]:
    """Of the gradient, queries, keys, values and the result, which other operands follow."""

    def backward(*operands: Any, **options: Any) -> Any:
        if operands[0].dtype != torch.bfloat16:
            return own(*operands, **options)
        wide = workspace.widened(operands[:5])
        return tuple(values.to(torch.bfloat16) for values in own(*wide, *operands[5:], **options))

    return backward
