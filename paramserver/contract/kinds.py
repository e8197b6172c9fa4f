"""The kinds of state that a store keeps of each parameter: the contract's enum, and its words.

The contract (parameter_store.proto) defines them. The daemon's storage has an enum of its own, because its words are on
the disks; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from paramserver.contract.words import word_of, words_of
from paramserver.v1 import parameter_store_pb2 as pb

Kind: TypeAlias = pb.Kind

# The kinds that every optimizer has; the others are the states of some optimizers (contract/optimizers).
PARAM = pb.KIND_PARAM
MASTER = pb.KIND_MASTER
GRAD = pb.KIND_GRAD

# The words of the kinds that outlive a step, which are all but the gradient's.
StoredKind = Literal["param", "master", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum"]

KINDS: Mapping[str, Kind] = words_of(pb.Kind)


def kind_name(kind: Kind) -> str:
    """Return the word for a kind; for an optimizer's state, this is torch's name of the state."""
    return word_of(pb.Kind, kind)
