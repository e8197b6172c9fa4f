"""Commits have the extra states of modules, as far as they can be encoded and there is room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer_client.errors import ClientStateError
from trainer_client.training.model.plain_state import modules_with_extra_state
from trainer_client.training.run.extra_states import MAX_EXTRA_BYTES, ExtraStates


class Holder(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def model_of(*states: Any) -> nn.Sequential:
    return nn.Sequential(*(Holder(state) for state in states), nn.Linear(1, 1))


def test_names_are_those_of_the_state_dict() -> None:
    model = model_of(1, None)
    assert list(modules_with_extra_state(model)) == [name for name in model.state_dict() if "extra" in name]
    assert list(modules_with_extra_state(Holder(1))) == list(Holder(1).state_dict())
    shared = Holder(1)
    assert list(modules_with_extra_state(nn.Sequential(shared, shared))) == ["0._extra_state", "1._extra_state"]


@pytest.mark.parametrize("state", [None, 3, {"amax": torch.arange(3.0), "of": (1, "two")}, b"bytes", {1, 2}])
def test_a_state_comes_back_with_its_types(state: Any) -> None:
    stored, other = ExtraStates(model_of(state), is_loud=True).to_commit(), model_of("other")
    ExtraStates(other, is_loud=True).restore(stored)
    found = other[0].state
    if isinstance(state, dict):
        assert torch.equal(found["amax"], state["amax"]) and found["of"] == state["of"]
    else:
        assert found == state and type(found) is type(state)


def test_what_a_commit_cannot_carry_is_left_out_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    large = "x" * (MAX_EXTRA_BYTES // 2)
    model = model_of(large, large, object(), "small")
    states = ExtraStates(model, is_loud=True)
    for _ in range(2):
        assert list(states.to_commit()) == ["0._extra_state", "3._extra_state"]
    assert [record.args[0] for record in caplog.records if record.args] == ["1._extra_state", "2._extra_state"]
    assert "a commit has room for" in caplog.text and "weights_only" in caplog.text
    caplog.clear()
    ExtraStates(model, is_loud=False).to_commit()
    assert not caplog.records


def test_a_state_that_the_model_lacks_is_named_and_a_damaged_one_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    stored = ExtraStates(model_of(1, 2), is_loud=True).to_commit()
    ExtraStates(model_of(1), is_loud=True).restore(stored)
    assert "'1._extra_state' is not in this model" in caplog.text
    ExtraStates(model_of(1), is_loud=True).restore(None)
    with pytest.raises(ClientStateError, match="cannot be read"):
        ExtraStates(model_of(1), is_loud=True).restore({"0._extra_state": {"torch": "AAAA"}})
