"""The kinds of state that a store keeps of each parameter: the contract's enum, and its words.

parameter_store.proto defines the kinds. The daemon's storage has an enum of its own, because its words are written to
the disks; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from paramserver.contract import stored_kind
from paramserver.contract.words import word_of, words_of
from paramserver.v1 import parameter_store_pb2 as pb

Kind: TypeAlias = pb.Kind
StoredKind: TypeAlias = stored_kind.StoredKind

# The kinds of bytes that a job has with any optimizer. All other kinds are optimizer states (contract/optimizers).
PARAM = pb.KIND_PARAM
MASTER = pb.KIND_MASTER
GRAD = pb.KIND_GRAD

KINDS: Mapping[str, Kind] = words_of(pb.Kind)


def kind_name(kind: Kind) -> str:
    """Return the word for a kind, for example "param". For an optimizer's state it is torch's name of the state."""
    return word_of(pb.Kind, kind)
