"""The storage engine's words beside the wire's enums: kinds of state, element types and tiers, value by value.

The engine has enums of its own because its words are on the disks. Each value of the engine has the contract's value of
the same name, so this module fails to import where one is missing; a test asserts that none of the contract's is left.
"""

from __future__ import annotations

from collections.abc import Mapping

from paramserver.contract.kinds import KINDS
from paramserver.contract.tiers import TIERS
from paramserver.contract.words import words_of
from paramserver.v1 import parameter_store_pb2 as pb
from storage.shard import DType, Kind, TierName

_DTYPES = words_of(pb.DType)

KIND_TO_WIRE: Mapping[Kind, pb.Kind] = {kind: KINDS[kind.name.lower()] for kind in Kind}
DTYPE_TO_WIRE: Mapping[DType, pb.DType] = {dtype: _DTYPES[dtype.name.lower()] for dtype in DType}
TIER_TO_WIRE: Mapping[TierName, pb.Tier] = {tier: TIERS[tier.name.lower()] for tier in TierName}

KIND_FROM_WIRE: Mapping[pb.Kind, Kind] = {value: kind for kind, value in KIND_TO_WIRE.items()}
DTYPE_FROM_WIRE: Mapping[pb.DType, DType] = {value: dtype for dtype, value in DTYPE_TO_WIRE.items()}
TIER_FROM_WIRE: Mapping[pb.Tier, TierName] = {value: tier for tier, value in TIER_TO_WIRE.items()}
