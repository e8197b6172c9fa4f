"""Digests of parameters, by which a change in place is noticed that torch's version counters do not show.

`parameter.data.clamp_()`, an array of numpy that shares a parameter's memory and `vector_to_parameters` leave the
counters as they are, so only the bytes tell. This module must never change a byte.

[Note: the cost of a digest] On the CPU a digest is XXH3, which reads as fast as the memory allows: 7.8 GB/s on one of
two busy cores of a cloud machine, 56 GB/s from its cache. On an accelerator it is a sum of products modulo 2^64 of
32-bit words and mixed numbers of 64 bits, so that no bit of a word is shifted out, and stays on the device until it is
compared. Both are for accidents, and not for attackers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash

# The words of 4 bytes that an accelerator multiplies at once, for which it takes 8 MiB of factors and as much for the
# products, until the digest is there.
_WORDS_AT_ONCE = 1 << 20
# Odd factors without a pattern, those of SplitMix64, as signed numbers.
_GOLDEN, _MIXED = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def digest_on_host(content: memoryview, parts: Iterable[slice]) -> int:
    """Return the digest of some parts of `content`, given in bytes."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(content[part])
    return digest.intdigest()


def digest_on_device(values: torch.Tensor) -> torch.Tensor:
    """Return the digest of a flat tensor, 0-D int64 on its device, without a wait for the device."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    factors = _factors(min(_WORDS_AT_ONCE, -(-values.nbytes // 4) + 1), values.device)
    for words in _words(values):
        total = total * _GOLDEN + (words * factors[: words.numel()]).sum()
    return total


def _words(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a flat tensor as runs of int32, and those beyond the last whole word as one run."""
    whole = values.nbytes // 4 * 4 // values.itemsize
    if whole:
        yield from values[:whole].view(torch.int32).split(_WORDS_AT_ONCE)
    if whole < values.numel():
        yield values[whole:].view(torch.uint8).to(torch.int32)


def _factors(number: int, device: torch.device) -> torch.Tensor:
    """Return factors [number] in which no pattern of the words can cancel out; int64 on the device."""
    factors = torch.arange(1, number + 1, device=device) * _GOLDEN
    factors = (factors ^ (factors >> 30)) * _MIXED
    return factors ^ (factors >> 27)
