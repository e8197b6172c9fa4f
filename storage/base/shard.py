"""Shards, groups, kinds, slabs and jobs: the names and layouts by which the store identifies bytes.

A *unit* is a part of the model that the trainer gathers at once. A *group* is the set of shards that one rank keeps of
one unit; it exists in several *kinds* (parameter, master weight, moments, gradient). The bytes of one kind of one group
are a *slab*, which the tiers store, move and lease as one run. Groups are named by the unit and the element range that
they cover, never by a rank.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from storage.base.codec import PLAIN, SlabLayout, layout_of
from storage.base.errors import InvalidRequestError

# torch's fused CPU AdamW rounds the last `numel % 16` elements of a call differently. So every shard starts at a
# multiple of 16 elements of its parameter. Then an update of the shards gives the same bits as an update of the whole
# parameter.
ELEMENT_ALIGNMENT = 16

# This separates the parts of a job's identity: the name alone, or the name and the layout's name. The catalog's name of
# a kept step has four parts: the job, the layout, the step's own name, and the note that a client gave it.
LAYOUT_SEPARATOR = "\n"


class Kind(enum.StrEnum):
    """The meaning of a slab's bytes: a parameter, its master weight, its gradient, or an optimizer state."""

    PARAM = "param"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM_BUFFER = "momentum_buffer"
    SUM = "sum"
    GRAD = "grad"


# The kinds of slabs that an optimizer keeps for a parameter besides its master weight. They are fp32, or encoded by a
# codec that decodes to fp32, and zeros until they are written.
OPTIMIZER_STATES = frozenset(Kind) - {Kind.PARAM, Kind.MASTER, Kind.GRAD}
# The most kinds of optimizer state that one group may have, because an update tile has room for this many.
MAX_OPTIMIZER_STATES = 2


class DType(enum.StrEnum):
    """The element types of parameters, gradients and optimizer states that the store can keep."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @cached_property
    def torch(self) -> torch.dtype:
        """The torch dtype, which has the same name."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype

    # The size is computed once and kept, because a store of a million shards asks for it four million times when it is
    # opened.
    @cached_property
    def itemsize(self) -> int:
        """The size of one element in bytes."""
        return self.torch.itemsize


class TierName(enum.StrEnum):
    """The tiers, fastest first. A slab can be at home on `host` and `nvme`; the others have copies only."""

    GPU = "gpu"
    HOST = "host"
    REMOTE = "remote"
    NVME = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Elements `[offset, offset + numel)` of one flattened parameter, as one rank has them.

    In the group they begin at element `group_offset`.
    """

    fqn: str
    offset: int
    numel: int
    group_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabSpec:
    """One kind of a group: its element type, and the tier in which its newest version stays (`placement`).

    `codec` is the name of the codec in whose records the elements are stored, or PLAIN; `dtype` is what they decode to.
    """

    kind: Kind
    dtype: DType
    placement: TierName
    codec: str = PLAIN

    def layout(self, numel: int) -> SlabLayout:
        """Return how the elements lie in the slab's bytes, if the group has `numel` elements.

        Raises:
            NewerFormatError: the codec is not known.
            InvalidRequestError: the codec does not encode elements of this type.
        """
        return layout_of(self.codec, numel, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class SlabKey:
    """The name of a slab: its job (`JobSpec.identity`), its group and its kind."""

    job: str
    group: str
    kind: Kind

    @property
    def job_name(self) -> str:
        """The name of the job, without its layout's name."""
        return self.job.partition(LAYOUT_SEPARATOR)[0]

    def label(self, step: int) -> str:
        """Return a name for a version of the slab, for traces, checksums and error texts."""
        return f"{self._label_prefix}{step}"

    def is_of(self, label: str) -> bool:
        """Return whether a label is the name of a version of the slab at any step."""
        return label.startswith(self._label_prefix)

    @property
    def _label_prefix(self) -> str:
        return f"{self.job}/{self.group}/{self.kind.value} at step "

    def __str__(self) -> str:
        return f"{self.job_name}/{self.group}/{self.kind.value}"


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The specification of a group: shards that are stored, moved and leased together.

    `numel` is the number of elements of each kind, with the padding between the shards.
    """

    name: str
    numel: int
    shards: tuple[Shard, ...]
    slabs: tuple[SlabSpec, ...]

    @cached_property
    def slab_of_kind(self) -> dict[Kind, SlabSpec]:
        """The specification of each of the group's slabs, by the slab's kind."""
        return {slab.kind: slab for slab in self.slabs}

    def layout(self, kind: Kind) -> SlabLayout:
        """Return how the elements of one kind lie in its bytes."""
        return self.slab_of_kind[kind].layout(self.numel)

    def keeps(self, kind: Kind, shard: Shard) -> bool:
        """Return whether the group has bytes of one kind for all elements of a shard."""
        first = shard.group_offset
        return kind in self.slab_of_kind and self.layout(kind).keeps(first, first + shard.numel)

    def fqns_at(self, kind: Kind, offset: int, nbytes: int) -> tuple[str, ...]:
        """Return the FQNs of the shards that have elements in the bytes `[offset, offset + nbytes)` of one kind."""
        first, end = self.layout(kind).elements_of(offset, offset + nbytes)
        return tuple(s.fqn for s in self.shards if s.group_offset < end and s.group_offset + s.numel > first)

    def validate(self) -> None:
        """Check that the group is well-formed: its kinds are valid, its shards are in order, aligned and inside of it.

        Raises:
            InvalidRequestError: the group is not well-formed; the message names the group and the field.
        """
        if not self.name:
            raise InvalidRequestError("a shard group has an empty name; name it by its unit and element range")
        if self.numel <= 0 or self.numel % ELEMENT_ALIGNMENT:
            raise InvalidRequestError(
                f"group {self.name!r}: numel {self.numel} must be a positive multiple of {ELEMENT_ALIGNMENT}"
            )
        if len(self.slab_of_kind) != len(self.slabs):
            raise InvalidRequestError(f"group {self.name!r} names a kind twice")
        if Kind.PARAM not in self.slab_of_kind:
            raise InvalidRequestError(f"group {self.name!r} has no slab of kind param")
        for slab in self.slabs:
            if slab.codec != PLAIN and slab.kind not in OPTIMIZER_STATES:
                raise InvalidRequestError(
                    f"group {self.name!r}: kind {slab.kind.value} cannot be encoded (codec {slab.codec!r}); only the "
                    "optimizer's states can"
                )
            slab.layout(self.numel)
        states = sorted(kind.value for kind in OPTIMIZER_STATES & self.slab_of_kind.keys())
        if len(states) > MAX_OPTIMIZER_STATES:
            raise InvalidRequestError(
                f"group {self.name!r} has the optimizer states {', '.join(states)}; no optimizer here has more than "
                f"{MAX_OPTIMIZER_STATES}"
            )
        end = 0
        for shard in self.shards:
            if shard.group_offset < end or shard.numel <= 0 or shard.group_offset + shard.numel > self.numel:
                raise InvalidRequestError(
                    f"group {self.name!r}: shard {shard.fqn!r} at position {shard.group_offset}, {shard.numel} "
                    f"elements, overlaps its neighbour or leaves the group's {self.numel} elements"
                )
            if shard.group_offset % ELEMENT_ALIGNMENT or shard.offset % ELEMENT_ALIGNMENT:
                raise InvalidRequestError(
                    f"group {self.name!r}: shard {shard.fqn!r} starts at offset {shard.offset}, position "
                    f"{shard.group_offset}; both must be multiples of {ELEMENT_ALIGNMENT}"
                )
            end = shard.group_offset + shard.numel


# The beginning of the name of a ParameterSpec that stands for a rank's large buffers (torch's register_buffer) and not
# for a parameter. paramserver/contract/buffer_names.py makes these names.
BUFFERS_BEGIN = "(buffers of rank "


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter of the model; `dtype` is the element type of its slab of Kind.PARAM."""

    fqn: str
    shape: tuple[int, ...]
    dtype: DType
    trainable: bool

    @property
    def has_buffers(self) -> bool:
        """Whether this entry stands for the large buffers of a rank's modules, and not for a parameter of the model."""
        return self.fqn.startswith(BUFFERS_BEGIN)


class Parameters(tuple[ParameterSpec, ...]):
    """The parameters of a model, in the model's order.

    Equality compares digests. The digest and the lookups by name are computed once and kept, because they take 0.2 s
    for 100,000 parameters.
    """

    @cached_property
    def by_name(self) -> dict[str, ParameterSpec]:
        """The parameters by FQN."""
        return {parameter.fqn: parameter for parameter in self}

    @cached_property
    def index_by_name(self) -> dict[str, int]:
        """The place of each parameter in the model's order, from 0, by FQN."""
        return {parameter.fqn: index for index, parameter in enumerate(self)}

    @cached_property
    def digest(self) -> bytes:
        """A digest of all fields of all parameters."""
        state = hashlib.blake2b(digest_size=32)
        for p in self:
            state.update(repr((p.fqn, p.shape, p.dtype.value, p.trainable)).encode())
        return state.digest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Parameters):
            return super().__eq__(other)
        return self is other or (len(self) == len(other) and self.digest == other.digest)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durability:
    """The durability of a job: every `every_steps`-th commit survives kill -9 and power loss; with 0 none does."""

    every_steps: int

    def covers(self, step: int) -> bool:
        """Return whether the job's durability requires that the commit of `step` becomes durable."""
        return self.every_steps > 0 and step % self.every_steps == 0

    def __str__(self) -> str:
        return {0: "none", 1: "step"}.get(self.every_steps, f"snapshot:{self.every_steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job: its model, its number of ranks and its durability.

    Attributes:
        local_ranks: the number of the `world_size` ranks that are attached to this store now.
        layout: the client's name for the partition of the model into groups. A job that is continued with another
            partition gets another layout.
        kept: in the record of a kept step, the name of the step; "" in the record of the job itself.
        note: in the record of a kept step, the text for operators that the client gave with the name; "" in the record
            of the job itself.
    """

    name: str
    world_size: int
    local_ranks: int
    parameters: tuple[ParameterSpec, ...]
    durability: Durability
    layout: str = ""
    kept: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, Parameters):
            object.__setattr__(self, "parameters", Parameters(self.parameters))
        if LAYOUT_SEPARATOR in self.name + self.layout + self.kept + self.note:
            raise InvalidRequestError(
                f"job {self.name!r}, layout {self.layout!r}, kept step {self.kept!r}, note {self.note!r}: a name "
                "has no line feed"
            )

    @property
    def model(self) -> Parameters:
        """The job's parameters as `Parameters`, which has their digest and the look-ups by name."""
        assert isinstance(self.parameters, Parameters)
        return self.parameters

    @property
    def identity(self) -> str:
        """The unique name of this layout of the job. A kept step has that of the layout it was made in."""
        return f"{self.name}{LAYOUT_SEPARATOR}{self.layout}" if self.layout else self.name

    @property
    def stored_as(self) -> str:
        """The unique name in the catalog: the identity, or for a kept step its four parts."""
        if not self.kept:
            return self.identity
        return LAYOUT_SEPARATOR.join((self.name, self.layout, self.kept, self.note))

    def without_ranks(self) -> JobSpec:
        """Return the specification of the same job with no rank attached, as it is when no run uses the job."""
        return replace(self, local_ranks=0)
