"""The storage engine's kinds, element types and tiers, each mapped to the value of the wire's enum and back.

The engine has enums of its own because their words are written to the disks. Each value has the same name in both
enums. If the contract lacks a value of the engine, the import of this module fails. A test asserts that the engine
lacks no value of the contract.
"""

from __future__ import annotations

from collections.abc import Mapping

from paramserver.contract.kinds import KINDS
from paramserver.contract.tiers import TIERS
from paramserver.contract.words import words_of
from paramserver.v1 import parameter_store_pb2 as pb
from storage.base.shard import DType, Kind, TierName

_DTYPES = words_of(pb.DType)

KIND_TO_WIRE: Mapping[Kind, pb.Kind] = {kind: KINDS[kind.name.lower()] for kind in Kind}
DTYPE_TO_WIRE: Mapping[DType, pb.DType] = {dtype: _DTYPES[dtype.name.lower()] for dtype in DType}
TIER_TO_WIRE: Mapping[TierName, pb.Tier] = {tier: TIERS[tier.name.lower()] for tier in TierName}

KIND_FROM_WIRE: Mapping[pb.Kind, Kind] = {value: kind for kind, value in KIND_TO_WIRE.items()}
DTYPE_FROM_WIRE: Mapping[pb.DType, DType] = {value: dtype for dtype, value in DTYPE_TO_WIRE.items()}
TIER_FROM_WIRE: Mapping[pb.Tier, TierName] = {value: tier for tier, value in TIER_TO_WIRE.items()}
