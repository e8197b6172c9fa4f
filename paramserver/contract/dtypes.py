"""The element types that a store keeps: the contract's enum, and the same types in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from paramserver.contract.words import words_of
from paramserver.v1 import parameter_store_pb2 as pb

DType: TypeAlias = pb.DType

# The wire contract names its dtypes as torch does, so getattr(torch, name) finds the torch dtype of each.
TORCH_DTYPES: Mapping[DType, torch.dtype] = {value: getattr(torch, word) for word, value in words_of(pb.DType).items()}
WIRE_DTYPES: Mapping[torch.dtype, DType] = {dtype: value for value, dtype in TORCH_DTYPES.items()}
