"""bf16 where the processor has no instructions for it: products of matrices are computed in fp32, and rounded.

With AVX2 alone, torch multiplies bf16 matrices three hundred times slower than fp32 ones, so that a step would take an
hour of which this project's part could not be seen. Sums are in fp32 with such instructions, too: the values are as
exact as there. All contestants compute so, forward and backward. Read by DeepSpeed's environment, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# What linear layers and attention come to. Attention's forward is as fast in bf16.
OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for name in OPERATORS:
            own = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _through_fp32(own.call_boxed), "CPU", allow_override=True)
    yield
    # Torch's own come back when this is gone.
    del library


def _through_fp32(kernel: Callable[..., Any]) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def product(first: torch.Tensor, *others: Any, **options: Any) -> Any:
        if first.dtype != torch.bfloat16:
            return kernel(keys, first, *others, **options)
        result = kernel(keys, first.float(), *(_widened(value) for value in others), **options)
        return tuple(each.bfloat16() for each in result) if isinstance(result, tuple) else result.bfloat16()

    return product


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
