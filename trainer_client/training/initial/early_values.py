"""Values of parameters before `initialize`, so that a script can read and change a model built under `zero.Init`.

This module owns the memory of parameters with such early values: within a context, or until `initialize` if a rank may
change the values. It must never give memory to parameters that the caller has not named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from trainer_client import comm
from trainer_client.training.initial.deferred_init import RecipeRecorder, recipe_of, replay
from trainer_client.training.model.availability import ZeroParamStatus, show_status
from trainer_client.training.ranks.host_group import host_group


@contextmanager
def early_values(tensors: Iterable[torch.Tensor], modifier_rank: int | None) -> Iterator[None]:
    """Give parameters with a recipe memory and their initial values within the context. All ranks must call this.

    Operations within the context are not recorded, even if the recorder of `zero.Init` is open, because a script may
    make them on one rank alone.

    Args:
        tensors: any tensors; those without a recipe are not changed.
        modifier_rank: the rank whose values all ranks get at the end of the context. The parameters then keep their
            memory until `initialize` has moved their values to the store. None: at the end, the parameters are on the
            meta device again, with their recipes. So they are after an error.
    """
    parameters = [tensor for tensor in tensors if recipe_of(tensor)]
    with RecipeRecorder.suspended(), ExitStack() as undone:
        _agree_on_seeds(parameters)
        for parameter in parameters:
            other = nn.Parameter(replay(parameter), requires_grad=parameter.requires_grad)
            vars(other).update(vars(parameter))
            show_status(other, ZeroParamStatus.AVAILABLE)
            # The parameter on the meta device is swapped with one that has values, because torch does not allow to
            # assign `.data` from another device.
            torch.utils.swap_tensors(parameter, other)
            undone.callback(torch.utils.swap_tensors, parameter, other)
        yield
        if modifier_rank is not None:
            _broadcast([parameter.detach() for parameter in parameters], modifier_rank)
            undone.pop_all()


def _agree_on_seeds(parameters: Iterable[torch.Tensor]) -> None:
    """Give all ranks the seeds of rank 0's recorders, and fix them, so that `initialize` does not change them."""
    recipes = [recipe for parameter in parameters if (recipe := recipe_of(parameter))]
    for recorder in {id(recipe.recorder): recipe.recorder for recipe in recipes}.values():
        if not recorder.is_fixed:
            seed = torch.tensor([recorder.seed])
            _broadcast([seed], 0)
            recorder.reseed(int(seed))
            recorder.fix()


def _broadcast(tensors: Sequence[torch.Tensor], source: int) -> None:
    """Overwrite every rank's tensors, which are in host memory, with those of rank `source`."""
    if tensors and comm.get_world_size() > 1:
        comm.init_distributed(verbose=False)
        with host_group() as group:
            for tensor in tensors:
                comm.broadcast(tensor, src=source, group=group)
