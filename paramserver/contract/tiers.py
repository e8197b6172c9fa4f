"""The tiers of a store: the contract's enum, and its words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from paramserver.contract.words import word_of, words_of
from paramserver.v1 import parameter_store_pb2 as pb

Tier: TypeAlias = pb.Tier

HOST = pb.TIER_HOST
NVME = pb.TIER_NVME

TIERS: Mapping[str, Tier] = words_of(pb.Tier)


def tier_name(tier: Tier) -> str:
    """Return the word for a tier: "gpu", "host" or "nvme"."""
    return word_of(pb.Tier, tier)
