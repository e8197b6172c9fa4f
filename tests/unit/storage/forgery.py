"""A forger of XXH3-64: it changes bytes of a block so that the checksum of `storage/base/integrity.py` stays the same.

XXH3-64 hashes a long input in pieces of 1024 bytes, each of 16 stripes of 8 words of 64 bits (lanes). Within a piece,
word `v` of lane `i` adds `v` to one sum of 64 bits, and the product of the two halves of `v ^ key` to another one. So
five words of one lane, one of them chosen freely, can be replaced with both sums kept. The keys follow from the seed.
"""

from __future__ import annotations

import random
import struct

import xxhash

_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1
# The beginning of XXH3's default secret (xxhash.h, kSecret). The key of stripe n, lane 0 is at byte 8 * n.
_SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578")


def forge(block: memoryview, label: str, number: int, value: int) -> None:
    """Replace five words at the beginning of a block of a version, the first of them by `value`, a word of 64 bits."""
    seed = xxhash.xxh3_64_intdigest(label.encode()) + number & _WORD
    before = xxhash.xxh3_64_intdigest(block, seed)
    keys = [_key(seed, 8 * stripe) for stripe in range(5)]
    words = [struct.unpack_from("<Q", block, 64 * stripe)[0] for stripe in range(5)]
    total = sum(words) - value & _WORD
    products = sum(_product(word ^ key) for word, key in zip(words, keys, strict=True)) - _product(value ^ keys[0])
    # The second and the third word bring the sum of products, and the last two the sum of words.
    while True:
        high = random.randrange(1 << 31, 1 << 32)
        low, rest = divmod(products & _WORD, high)
        if low <= _HALF:
            break
    second, third = keys[1] ^ (high << 32 | low), keys[2] ^ (1 << 32 | rest)
    missing = total - second - third & _WORD
    # Words whose key'd half is zero have the product zero. One has its low half free, the other its high half.
    fourth = (keys[3] >> 32 << 32) | (missing - (keys[4] & _HALF) & _HALF)
    fifth = missing - fourth & _WORD
    for stripe, word in enumerate((value, second, third, fourth, fifth)):
        struct.pack_into("<Q", block, 64 * stripe, word)
    assert xxhash.xxh3_64_intdigest(block, seed) == before


def _key(seed: int, at: int) -> int:
    """Return the word of the seeded secret at a byte. The seed is added to even words, and subtracted from odd ones."""
    (word,) = struct.unpack_from("<Q", _SECRET, at)
    return word + seed & _WORD if at % 16 == 0 else word - seed & _WORD


def _product(word: int) -> int:
    return (word & _HALF) * (word >> 32)
