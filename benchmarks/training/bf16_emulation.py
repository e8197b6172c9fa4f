"""An emulation of bf16 for processors without bf16 instructions: matrix products in fp32, rounded to bf16.

On a processor with AVX2 only, torch multiplies bf16 matrices three hundred times slower than fp32 ones. A step would
take an hour, in which the cost of this project would be invisible. Processors with bf16 instructions sum in fp32, too,
so the emulated values are as exact. All contestants use the emulation, forward and backward. DeepSpeed's environment
imports this module, so it must need nothing but torch.
"""

from __future__ import annotations

import mmap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# The products of linear layers, and the backward of attention. The forward of attention is not replaced, because it is
# as fast in bf16.
PRODUCTS = ("mm", "addmm")
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def need_fp32() -> bool:
    """Return whether this processor lacks bf16 instructions, so that products must be computed in fp32."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def precision_in_words() -> str:
    """Return a phrase for the results that says in which precision the training benchmarks compute."""
    words = "bf16 with fp32 master weights and moments"
    if need_fp32():
        words += " (products of matrices in fp32 and rounded: the processor has no instructions for bf16)"
    return words


@contextmanager
def in_fp32() -> Iterator[None]:
    """Emulate products of bf16 matrices on the CPU in this process until the block ends."""
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
    # Torch's own kernels are used again when the library object is deleted.
    del library


class _Workspace(threading.local):
    """Memory for fp32 operands and results, kept from product to product.

    Products with bf16 instructions need no such memory. So it must not come from malloc, where it would fragment the
    heap, nor be mapped anew each time, which would cost page faults.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def empty(self, place: int, size: Sequence[int]) -> torch.Tensor:
        """Return an uninitialised fp32 tensor [*size] in slot `place`; the slot's former contents are lost."""
        numel = torch.Size(size).numel()
        if place not in self._kept or self._kept[place].numel() < numel:
            self._kept.pop(place, None)
            pages = mmap.mmap(-1, max(1, numel) * torch.float32.itemsize)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._kept[place] = torch.frombuffer(pages, dtype=torch.float32)
        return self._kept[place][:numel].view(size)

    def widened(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return fp32 copies of `values`, in slots 0, 1, ...

        A tensor that is contiguous in another order of its dimensions keeps that order, because transposing a matrix
        here would take longer than copying it.
        """
        wide = []
        for place, each in enumerate(values):
            order = sorted(range(each.dim()), key=each.stride, reverse=True)
            straight = each.permute(order)
            copy = self.empty(place, straight.size()).copy_(straight)
            wide.append(copy.permute([order.index(dimension) for dimension in range(each.dim())]))
        return wide


def _own(name: str) -> Callable[..., Any]:
    """Return torch's own CPU kernel of an operator."""
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
    """Return the fp32 product of the last two operands, with a bias if there is one before them.

    The result is in the workspace, so the next product overwrites it.
    """
    left, right = operands[-2:]
    result = workspace.empty(len(operands), (*left.shape[:-1], right.shape[-1]))
    own_into(*workspace.widened(operands), **factors, out=result)
    return result


def _attention_backward(own: Callable[..., Any], workspace: _Workspace) -> Callable[..., Any]:
    """Return a kernel for the backward of attention that computes bf16 in fp32.

    Its first five operands are the gradient, queries, keys, values and the result of the forward.
    """

    def backward(*operands: Any, **options: Any) -> Any:
        if operands[0].dtype != torch.bfloat16:
            return own(*operands, **options)
        wide = workspace.widened(operands[:5])
        return tuple(values.to(torch.bfloat16) for values in own(*wide, *operands[5:], **options))

    return backward
