"""At world size 1 every collective is the identity and needs no process group."""

from __future__ import annotations

import torch

from trainer_client.ranks.collectives import Collectives


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
