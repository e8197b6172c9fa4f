"""Requests for the campaign of `fuzz.py`, made from the descriptors of the services: valid ones, and spoiled copies.

The same seed and the same `Known` give the same bytes. A valid request is built from what its client knows. Then some
fields are set to edge values of their types, and then some bits of the wire form are flipped. So most of a request
stays valid and gets past the first check.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from paramserver.v1 import parameter_store_pb2 as pb
from tests.integration.support.store_client import group_to_wire, job_fields
from tests.unit.storage.builders import GRAD_SCALE, Layout

EDGES = (0, 1, 2, 15, 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SIGNED_EDGES = (0, 1, -1, -2, (1 << 31) - 1, -(1 << 31))
FLOATS = (0.1, 0.5, 1.0)
FLOAT_EDGES = (0.0, -0.0, 1.0, -1.0, 5e-324, 1.8e308, -1.8e308, float("inf"), float("-inf"), float("nan"), 2.0**64)
# Bytes that are not UTF-8. Python refuses to put them into a string field, so they replace NOT_UTF8_MARK in the wire
# form.
NOT_UTF8 = b"\xff\xfe\xc0\x80\xed\xa0\x80"
NOT_UTF8_MARK = "NOTUTF8"
STRINGS = (
    *("", " ", "x" * 1024, "x" * 1025, "é" * 600, "\0", "\x1b[2J", "a\nb", "\u202e", "../../etc/passwd", "%s%n{0}"),
    *("-1", "9" * 400, "NaN", "x" * 100_000, NOT_UTF8_MARK),
)
MANY = (2, 17, 300, 5_000)
LARGE_PAYLOAD_BYTES = (0, 1, 65_537, (1 << 20) + 1)
# Nested groups in an unknown field, deeper than the 100 levels that protobuf parses.
DEEP = b"\xfb\x07" * 5_000 + b"\xfc\x07" * 5_000

EDGES_OF_TYPE: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_ENUM: (0, 77, -1, (1 << 31) - 1),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_STRING: STRINGS,
    FieldDescriptor.TYPE_DOUBLE: FLOAT_EDGES,
    FieldDescriptor.TYPE_UINT32: [edge for edge in EDGES if edge < 1 << 32],
    FieldDescriptor.TYPE_INT32: SIGNED_EDGES,
    FieldDescriptor.TYPE_SINT32: SIGNED_EDGES,
}
_BETAS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999}
_ROWS = (
    pb.ApplyGradientsRequest.HyperParameters(adamw=pb.AdamW(**_BETAS, eps=1e-8, update_count=1)),
    pb.ApplyGradientsRequest.HyperParameters(adam=pb.Adam(**_BETAS, eps=1e-8, weight_decay=0.1, update_count=2)),
    pb.ApplyGradientsRequest.HyperParameters(lion=pb.Lion(**_BETAS, weight_decay=0.1)),
    pb.ApplyGradientsRequest.HyperParameters(sgd=pb.Sgd(lr=0.1, update_count=1)),
    pb.ApplyGradientsRequest.HyperParameters(sgd=pb.Sgd(lr=0.1, momentum=0.9, nesterov=True, update_count=1)),
    pb.ApplyGradientsRequest.HyperParameters(adagrad=pb.Adagrad(lr=0.1, eps=1e-10, update_count=1)),
)
_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


@dataclass(slots=True, kw_only=True)
class Known:
    """The state that a client knows, from which valid requests are made."""

    session_id: str
    layout: Layout
    # The ids of other clients' sessions.
    strangers: list[str] = field(default_factory=list)
    # The names of all clients' jobs.
    jobs: list[str] = field(default_factory=list)
    # The granted leases by id, and their sizes in bytes.
    leases: dict[int, pb.AcquireLeasesRequest.Want] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    # The ids of the open readers.
    readers: list[int] = field(default_factory=list)
    next_step: int = 0


class Requests:
    """A generator of random requests."""

    def __init__(self, rng: random.Random, known: Known) -> None:
        self._rng = rng
        self.known = known
        builders: dict[type[Message], Callable[[], Any]] = {
            pb.OpenJobRequest: self._open_job,
            pb.RegisterShardsRequest: self._register,
            pb.AcquireLeasesRequest: self._acquire,
            pb.AcquireLeasesRequest.Want: self._want,
            pb.TensorRange: self._range,
            pb.ApplyGradientsRequest: self._apply,
            pb.WithdrawUpdatesRequest: self._withdraw,
            pb.ParkGradientsRequest: self._park,
        }
        self._builders = {kind.DESCRIPTOR.full_name: build for kind, build in builders.items()}

    # --- whole requests

    def valid(self, kind: Descriptor) -> Any:
        """Return a request that an honest client could send."""
        build = self._builders.get(kind.full_name)
        return self._filled(kind) if build is None else build()

    def spoiled(self, kind: Descriptor) -> bytes:
        """Return the wire form of a request with some wrong fields or bits, or with none."""
        request = self.valid(kind)
        for _ in range(self._rng.choice((0, 0, 1, 1, 1, 2, 6))):
            self._spoil(request)
        data = encoded(request)
        return mutated(self._rng, data) if self._rng.random() < 0.35 else data

    def stream(self, kind: Descriptor) -> tuple[bytes, ...]:
        """Return the messages of a client's stream, most often with a valid beginning."""
        first = [encoded(message) for message in self._stream_of(kind)]
        more = [self.spoiled(kind) for _ in range(self._rng.choice((0, 0, 1, 3)))]
        if self._rng.random() < 0.2:
            first = [mutated(self._rng, data) if self._rng.random() < 0.5 else data for data in first]
        messages = first + more
        if self._rng.random() < 0.2:
            self._rng.shuffle(messages)
        return tuple(messages)

    # --- valid requests, by message

    def _open_job(self) -> pb.OpenJobRequest:
        known = self.known
        policies = pb.RESUME_POLICY_AUTO, pb.RESUME_POLICY_AUTO, pb.RESUME_POLICY_NEVER, pb.RESUME_POLICY_MUST
        fields = job_fields(known.layout) | {"run_id": known.session_id, "resume": self._rng.choice(policies)}
        if self._rng.random() < 0.2:
            fields["job"] = self._rng.choice(known.jobs)
        if self._rng.random() < 0.3:
            fields["layout"] = self._rng.choice(("one", "two", known.session_id))
            fields["world_size"] = self._rng.choice((1, 1, 2))
        return pb.OpenJobRequest(session_id=known.session_id, **fields)

    def _register(self) -> pb.RegisterShardsRequest:
        groups = [group_to_wire(self.known.layout.group(name)) for name in self.known.layout.groups]
        return pb.RegisterShardsRequest(session_id=self.known.session_id, groups=groups)

    def _want(self) -> pb.AcquireLeasesRequest.Want:
        known = self.known
        group, position = self._rng.choice(known.layout.groups), self._rng.randrange(1000)
        slab = pb.SlabName(group=group, kind=self._rng.choice((pb.KIND_PARAM, pb.KIND_EXP_AVG)))
        match self._rng.randrange(4):
            case 0:
                grad = pb.SlabName(group=group, kind=pb.KIND_GRAD)
                return pb.AcquireLeasesRequest.Want(slab=grad, mode=pb.LEASE_MODE_WRITE, step=self.known.next_step)
            case 1:
                return pb.AcquireLeasesRequest.Want(slab=slab, mode=pb.LEASE_MODE_WRITE, step=self.known.next_step)
            case 2:
                return pb.AcquireLeasesRequest.Want(range=self._range(), mode=pb.LEASE_MODE_READ, position=position)
            case _:
                as_of = self._rng.choice((None, known.next_step - 1, known.next_step, 0)) if known.next_step else None
                return pb.AcquireLeasesRequest.Want(
                    slab=slab, mode=pb.LEASE_MODE_READ, position=position, as_of_step=as_of
                )

    def _acquire(self) -> pb.AcquireLeasesRequest:
        wants = [self._want() for _ in range(self._rng.choice((1, 1, 2, 3)))]
        return pb.AcquireLeasesRequest(session_id=self.known.session_id, wants=wants)

    def _range(self) -> pb.TensorRange:
        group = self.known.layout.group(self._rng.choice(self.known.layout.groups))
        shard = self._rng.choice(group.shards)
        offset = self._rng.randrange(shard.numel)
        numel = self._rng.randrange(1, shard.numel - offset + 1)
        kind = self._rng.choice((pb.KIND_PARAM, pb.KIND_EXP_AVG_SQ))
        return pb.TensorRange(fqn=shard.fqn, kind=kind, offset=offset, numel=numel, reader_id=self._reader())

    def _apply(self) -> pb.ApplyGradientsRequest:
        known, request = self.known, pb.ApplyGradientsRequest()
        request.session_id, request.step = known.session_id, known.next_step
        # The groups have AdamW's states. Some of the other optimizers need the same ones; the rest must be refused.
        rows = [_ROWS[0], *self._rng.sample(_ROWS, k=self._rng.randrange(len(_ROWS)))]
        request.hyper_parameters.extend(rows)
        gradients = {want.slab.group: lease for lease, want in known.leases.items() if want.slab.kind == pb.KIND_GRAD}
        for group, lease in gradients.items():
            shards = [self._rng.choice((0, 0, -1, self._rng.randrange(len(rows)))) for _ in known.layout.shards]
            update = request.updates.add(
                group=group, grad_lease_id=lease, grad_scale=GRAD_SCALE, hyper_parameters_of_shard=shards
            )
            if self._rng.random() < 0.3:
                update.grad_clip_value = 0.5
        request.provisional = self._rng.random() < 0.5
        return request

    def _withdraw(self) -> pb.WithdrawUpdatesRequest:
        known = self.known
        groups = self._rng.sample(known.layout.groups, k=self._rng.randrange(len(known.layout.groups) + 1))
        return pb.WithdrawUpdatesRequest(session_id=known.session_id, step=known.next_step, groups=groups)

    def _park(self) -> pb.ParkGradientsRequest:
        known = self.known
        gradients = [lease for lease, want in known.leases.items() if want.slab.kind == pb.KIND_GRAD]
        parked = [lease for lease in gradients if self._rng.random() < 0.7]
        return pb.ParkGradientsRequest(session_id=known.session_id, lease_ids=parked)

    # --- valid streams, by the message that they consist of

    def _stream_of(self, kind: Descriptor) -> Iterator[Any]:
        match kind.name:
            case "SessionRequest":
                takes_up = self.known.session_id if self._rng.random() < 0.1 else ""
                hello = pb.SessionRequest.Hello(client="fuzz", session_id=takes_up)
                hello.registers_arena = self._rng.random() < 0.3
                yield pb.SessionRequest(hello=hello)
                for _ in range(self._rng.randrange(3)):
                    yield pb.SessionRequest(heartbeat=pb.Heartbeat())
            case "ReadRequest":
                yield self._read()
                for _ in range(self._rng.randrange(4)):
                    yield pb.ReadRequest(credit=pb.Credit(bytes=self._rng.choice((1, 1 << 20))))
            case "WriteRequest":
                yield from self._write()
            case _:
                yield self._filled(kind)

    def _read(self) -> pb.ReadRequest:
        credit = self._rng.choice((1, 4096, 1 << 20, 1 << 30))
        opening = pb.ReadRequest.Open(session_id=self.known.session_id, credit_bytes=credit)
        if self._rng.random() < 0.5:
            opening.range.CopyFrom(self._range())
        else:
            opening.lease_id = self._lease()
        opening.first_byte = self._rng.choice((0, 0, 1, 4096))
        return pb.ReadRequest(open=opening)

    def _write(self) -> Iterator[pb.WriteRequest]:
        lease = self._lease()
        size = self.known.sizes.get(lease, 64)
        start = self._rng.choice((0, 0, size // 2))
        header = pb.WriteHeader(
            session_id=self.known.session_id, lease_id=lease, first_byte=start, size_bytes=size - start
        )
        yield pb.WriteRequest(header=header)
        while start < size:
            data = self._rng.randbytes(min(self._rng.choice((16, 4096, 1 << 20)), size - start))
            if self._rng.random() < 0.05:
                return
            checksum = xxhash.xxh3_64_intdigest(data, seed=start)
            yield pb.WriteRequest(chunk=pb.Chunk(checksum=checksum, first_byte=start, data=data))
            start += len(data)

    # --- valid values, by the names of fields

    def _filled(self, kind: Descriptor) -> Any:
        message = GetMessageClass(kind)()
        chosen = {one.name: self._rng.choice(one.fields).name for one in kind.oneofs}
        for spec in kind.fields:
            group = spec.containing_oneof
            if group is not None and chosen[group.name] != spec.name:
                continue
            count = self._rng.choice((0, 1, 1, 3)) if spec.is_repeated else 1
            for _ in range(count):
                _put(message, spec, self._value(spec))
        return message

    def _value(self, spec: FieldDescriptor) -> Any:
        rng = self._rng
        match spec.type:
            case FieldDescriptor.TYPE_MESSAGE:
                return self.valid(_inner(spec))
            case FieldDescriptor.TYPE_ENUM:
                assert spec.enum_type is not None
                return rng.choice(spec.enum_type.values).number
            case FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.randrange(64))
            case FieldDescriptor.TYPE_STRING:
                return rng.choice(self._texts(spec.name))
            case kind:
                return rng.choice(FLOATS if kind in _FLOATS else self._numbers(spec.name))

    def _texts(self, name: str) -> Sequence[str]:
        layout, known = self.known.layout, self.known
        services = "", "paramserver.v1.ParameterStore", "grpc.health.v1.Health"
        fqns = [shard.fqn for shard in layout.group(layout.groups[0]).shards]
        texts: dict[str, Sequence[str]] = {
            "session_id": [*[known.session_id] * 20, *known.strangers],
            "job": [*[layout.name] * len(known.jobs), *known.jobs],
            "group": layout.groups,
            "fqn": fqns,
            "fqn_prefix": fqns,
            "page_token": ("", "", "2", *(f"1.0.{fqn}" for fqn in fqns)),
            "service": services,
            "file_containing_symbol": services,
        }
        return texts.get(name, ("fuzz",))

    def _numbers(self, name: str) -> Sequence[int]:
        step = self.known.next_step
        numbers: dict[str, Sequence[int]] = {
            "step": (step, max(0, step - 1), 0),
            "settled_step": (step, max(0, step - 1), 0),
            "lease_id": (self._lease(),),
            "reader_id": (self._reader(),),
        }
        return numbers.get(name, range(2))

    def _lease(self) -> int:
        return self._rng.choice(list(self.known.leases)) if self.known.leases else self._rng.randrange(4)

    def _reader(self) -> int:
        return self._rng.choice([0, *self.known.readers])

    # --- spoiling

    def _spoil(self, message: Message) -> None:
        """Set one random field of the message, or of a message in it, to an edge value of its type."""
        if not message.DESCRIPTOR.fields:
            return
        spec = _one_of(self._rng, message.DESCRIPTOR.fields)
        inner = spec.type == FieldDescriptor.TYPE_MESSAGE
        if inner and spec.is_repeated:
            items = getattr(message, spec.name)
            if items and self._rng.random() < 0.8:
                self._spoil(self._rng.choice(items))
            else:
                item = self.valid(_inner(spec))
                items.extend([item] * self._rng.choice(MANY))
        elif inner:
            self._spoil(getattr(message, spec.name))
        elif spec.is_repeated:
            edges = [self._edge(spec) for _ in range(self._rng.choice(MANY))]
            getattr(message, spec.name).extend(edges)
        else:
            setattr(message, spec.name, self._edge(spec))

    def _edge(self, spec: FieldDescriptor) -> Any:
        if spec.type == FieldDescriptor.TYPE_BYTES:
            return bytes(self._rng.choice(LARGE_PAYLOAD_BYTES))
        return self._rng.choice(EDGES_OF_TYPE.get(spec.type, EDGES))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with random faults: flipped bits, lost, doubled, moved or new bytes, and unknown fields."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 2, 7, 60))
        part = changed[at : at + length]
        match rng.randrange(8):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + length]
            case 4:
                changed[at:at] = part * rng.choice((1, 1, 30))
            case 5:
                changed[at:at] = rng.randbytes(length)
            case 6:
                changed = changed[at:] + changed[:at]
            case _:
                changed += rng.choice((b"\xfa\x07\x03abc", b"\xf8\x07\x01", b"\xff" * 11, DEEP))
    return bytes(changed)


def encoded(message: Message) -> bytes:
    """Return the wire form of a message, with NOT_UTF8 in place of each NOT_UTF8_MARK."""
    return message.SerializeToString().replace(NOT_UTF8_MARK.encode(), NOT_UTF8)


def _put(message: Message, spec: FieldDescriptor, value: Any) -> None:
    if spec.is_repeated:
        getattr(message, spec.name).append(value)
    elif spec.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, spec.name).CopyFrom(value)
    else:
        setattr(message, spec.name, value)


def _one_of(rng: random.Random, specs: Sequence[Any]) -> FieldDescriptor:
    spec: FieldDescriptor = rng.choice(specs)
    return spec


def _inner(spec: FieldDescriptor) -> Descriptor:
    assert spec.message_type is not None
    return spec.message_type


def fields_of(message: Message, names: Sequence[str]) -> Iterator[tuple[Message, str]]:
    """Yield every set field with one of these names, in the message or in a message in it."""
    for spec, value in message.ListFields():
        if spec.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if spec.is_repeated else (value,):
                yield from fields_of(inner, names)
        elif spec.name in names:
            yield message, spec.name
