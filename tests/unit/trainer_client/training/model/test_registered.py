"""A module has DeepSpeed's method that lists the parameters of other modules that it uses, also after a copy."""

from __future__ import annotations

import copy
import pickle

from torch import nn

from trainer_client.training.model.registered import registered_for, show_external


def test_the_method_of_a_module_lists_what_was_registered_for_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    registered_for(model[1]).append(model.get_parameter("0.weight"))

    show_external(model)

    assert list(model.ds_external_parameters()) == []
    assert [parameter is model[0].weight for _, parameter in model[1].ds_external_parameters()] == [True]


def test_a_copy_of_the_module_has_a_method_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    registered_for(model[1]).append(model.get_parameter("0.weight"))
    show_external(model)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [parameter is other[0].weight for _, parameter in other[1].ds_external_parameters()] == [True]
