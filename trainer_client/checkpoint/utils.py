"""DeepSpeed's helper for state dicts that are written with `torch.save`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` (any pytree) with copies of its tensors on `device`.

    A copy has a storage of its own size. `torch.save` would write the whole storage of a tensor that is a part of a
    larger one.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device, copy=True)

    return tree_map_only(torch.Tensor, copy, item)
