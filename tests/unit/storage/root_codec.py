"""A codec for tests: 8 bits for an element, with a scale for 16 elements, like the formats of optimizer states."""

from __future__ import annotations

import torch

from storage.base.codec import CODECS

BLOCK = 16
LEVELS = 127


class RootCodec:
    """Codes are the roots of elements, rounded to 127 levels below the largest root of their block, with their signs.

    A record has the codes of 65536 elements, and then the blocks' largest roots in fp32. The blocks are so short that
    none has elements of two shards, so the codec can be applied to a shard alone.
    """

    name = "test-root8"
    record_elements = 65536
    record_bytes = 65536 + 65536 // BLOCK * 4

    def decode(self, records: torch.Tensor, elements: torch.Tensor) -> None:
        """See `Codec.decode`."""
        codes = records[:, : self.record_elements].view(torch.int8).view(len(records), -1, BLOCK).float()
        largest = records[:, self.record_elements :].view(torch.float32)[..., None]
        elements.view_as(codes).copy_((codes.abs() / LEVELS * largest).square() * codes.sign())

    def encode(self, elements: torch.Tensor, records: torch.Tensor) -> None:
        """See `Codec.encode`."""
        blocks = elements.view(len(elements), -1, BLOCK)
        roots = blocks.abs().sqrt()
        largest = roots.amax(-1, keepdim=True)
        codes = (roots / torch.where(largest > 0, largest, 1) * LEVELS).round().clamp_(min=1) * blocks.sign()
        records[:, : self.record_elements].view(torch.int8).copy_(codes.view(len(elements), -1))
        records[:, self.record_elements :].view(torch.float32).copy_(largest[..., 0])


ROOT = RootCodec()
CODECS[ROOT.name] = ROOT


def rounded(elements: torch.Tensor) -> torch.Tensor:
    """Return what a slab with the codec keeps of a shard's elements, fp32 of any number."""
    size = -(-len(elements) // ROOT.record_elements) * ROOT.record_elements
    padded = torch.nn.functional.pad(elements, (0, size - len(elements))).view(-1, ROOT.record_elements)
    records = torch.empty(len(padded), ROOT.record_bytes, dtype=torch.uint8)
    ROOT.encode(padded, records)
    ROOT.decode(records, padded)
    return padded.reshape(-1)[: len(elements)]
