"""Digests of parameters' bytes, which find changes in place that torch's version counters do not show.

For example, `parameter.data.clamp_()`, a write to an array of numpy that shares a parameter's memory, and
`vector_to_parameters` do not increment the version counters. Then only the bytes show the change. This module must
never change a byte.

[Note: the cost of a digest] On the CPU a digest is XXH3, which reads as fast as the memory allows: 7.8 GB/s on one of
two busy cores of a cloud machine, 56 GB/s from its cache. On an accelerator a digest is a sum modulo 2^64. For each
32-bit word of the bytes, the sum has the product of the word and a 64-bit factor, which follows from the word's index.
Because a factor has twice the bits of a word, the product depends on every bit of the word. The digest stays on the
device until it is compared. Both digests find accidental changes. An attacker could make changes that they do not find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash

# A digest on an accelerator is computed from so many words of 4 bytes at once. The factors of so many words take 8 MiB
# of the accelerator's memory, and so do the products.
_WORDS_AT_ONCE = 1 << 20
# The constants of SplitMix64, as signed 64-bit numbers. This function makes random-looking numbers of 1, 2, 3, ...,
# which are the factors of the words in a digest.
_GOLDEN, _MIXED = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def digest_on_host(content: memoryview, parts: Iterable[slice]) -> int:
    """Return one digest of the bytes of `content` in `parts`, which are ranges of bytes."""
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
    """Yield the bytes of a flat tensor as runs of 4-byte words, and then the bytes after the last whole word.

    The latter bytes are one run, with one int32 for each byte.
    """
    whole = values.nbytes // 4 * 4 // values.itemsize
    if whole:
        yield from values[:whole].view(torch.int32).split(_WORDS_AT_ONCE)
    if whole < values.numel():
        yield values[whole:].view(torch.uint8).to(torch.int32)


def _factors(number: int, device: torch.device) -> torch.Tensor:
    """Return the factors of the first `number` words, int64 on the device.

    The factors look random, so two changes of words do not cancel out in the sum, except by a rare accident.
    """
    factors = torch.arange(1, number + 1, device=device) * _GOLDEN
    factors = (factors ^ (factors >> 30)) * _MIXED
    return factors ^ (factors >> 27)
