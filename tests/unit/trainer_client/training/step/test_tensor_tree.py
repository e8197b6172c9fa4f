"""A TensorTree finds tensors wherever modules put them, and reports whether an object may hide others."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from trainer_client.training.step.tensor_tree import TensorTree, computed_attributes


@dataclass
class Output:
    value: Any
    more: Any = None


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


Pair = namedtuple("Pair", "first second")
ONE, TWO = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("tree", "count", "hides_some"),
    [
        (None, 0, False),
        (ONE, 1, False),
        ((ONE, None, True, 3, 0.5, "text", torch.float32, torch.device("cpu"), torch.Size([1])), 1, False),
        ({"a": [ONE, {"b": (TWO,)}]}, 2, False),
        (Pair(ONE, TWO), 2, False),
        (Output(ONE, Output([TWO])), 2, False),
        (BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO, TWO)), 3, False),
        (Opaque(ONE), 0, True),
        ((ONE, Output(Opaque(TWO))), 1, True),
        ({ONE}, 0, True),
    ],
)
def test_tensors_are_found_and_what_may_hide_some_is_told(tree: Any, count: int, hides_some: bool) -> None:
    found = TensorTree.of(tree)

    assert (len(found.tensors), found.hides_some) == (count, hides_some)


def test_a_dataclass_without_all_of_its_fields_is_no_error() -> None:
    output = Output(ONE)
    del output.more

    assert len(TensorTree.of(output).tensors) == 1


def test_only_what_requires_grad_has_a_backward() -> None:
    assert len(TensorTree.of((ONE, torch.ones(1, requires_grad=True))).requiring_grad()) == 1


def test_attributes_are_found_if_autograd_has_made_them_since_a_node() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    leaf = torch.ones(1, requires_grad=True)
    old = leaf * 2
    since = torch._C._autograd._get_sequence_nr()
    new = [leaf * factor for factor in range(4)]
    vars(module).update(old=old, new=new[0], leaf=leaf, constant=ONE, number=3, text="text")
    vars(module[0]).update(several=[3, old, new[1]], by_name={"old": old, "new": new[2]}, pair=(new[3],), sizes=(2, 2))

    found = computed_attributes(module.modules(), since)

    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in new}
    assert len(found) == len(new)
