"""At world size 1 every collective is the identity and needs no process group."""

from __future__ import annotations

import tracemalloc

import torch

from trainer_client.training.ranks.collectives import Collectives


def test_a_single_rank_agrees_with_itself() -> None:
    alone = Collectives(torch.device("cpu"))
    flat = torch.empty(4)

    alone.all_gather_flat(flat, torch.arange(4.0))
    alone.barrier()

    assert flat.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert alone.gather_rows(torch.ones(2)).tolist() == [[1.0, 1.0]]
    assert alone.any_rank([True, False]) == [True, False]
    assert alone.broadcast_id(b"ab") == b"ab"
    assert alone.gather_bytes(b"any length") == [b"any length"]
    assert alone.gather_bytes(b"") == [b""]
    # A large content is not taken apart into a number for each byte.
    content = bytes(1 << 20)
    tracemalloc.start()
    try:
        assert alone.gather_bytes(content) == [content]
        assert tracemalloc.get_traced_memory()[1] < 3 * len(content)
    finally:
        tracemalloc.stop()
