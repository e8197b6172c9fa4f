"""A commit has the further names of tied parameters and the small buffers, as they are at that moment."""

from __future__ import annotations

import torch
from torch import nn

from trainer_client.training.model.parameters import list_parameters
from trainer_client.training.model.plain_state import MAX_BUFFER_BYTES, PlainState


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(2)
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.bfloat16))
        self.register_buffer("large", torch.zeros(MAX_BUFFER_BYTES // 4))
        self.register_buffer("passing", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"of the module": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_names_and_buffers_are_those_of_the_state_dict() -> None:
    model = Model()
    plain = PlainState(model, list_parameters(model))
    model.norm(torch.randn(4, 2))
    carried = plain.to_commit()

    assert carried["aliases"] == {"last.weight": "first.weight"}
    (name, empty), *others = carried["empty"].items()
    assert (name, tuple(empty.shape), empty.dtype, others) == ("nothing", (0, 3), torch.bfloat16, [])
    # The large buffer comes first, and the small ones have no room beside it.
    assert carried["buffers"].keys() == {"large"}
    assert sorted(carried["left_out"]) == [
        "_extra_state",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]
    model.large = torch.zeros(MAX_BUFFER_BYTES)
    carried = plain.to_commit()
    assert carried["left_out"] == ["_extra_state", "large"]
    assert torch.equal(carried["buffers"]["norm.running_mean"], model.state_dict()["norm.running_mean"])
    assert int(carried["buffers"]["norm.num_batches_tracked"]) == 1
    # A checkpoint has the larger ones, too, unless they have no plain bytes.
    model.register_buffer("without_values", torch.empty(MAX_BUFFER_BYTES, device="meta"))
    plain = PlainState(model, list_parameters(model))
    assert list(plain.larger_buffers(plain.to_commit()["buffers"])) == ["large"]
    assert {"_extra_state", "large", "norm.running_mean", "without_values"} <= set(plain.names)
