"""The wire form of chunks in Read, Write and AccessLoan calls, without the copies that protobuf makes in Python.

The field `chunk` of these calls' messages has the same number and type, so a message that holds a chunk is the same
bytes in each of them:

    12 <varint: length of the chunk>  09 <checksum: fixed64>  10 <first_byte: varint>  1a <varint: length> <data>

`encode` writes only this form, in which the data is the end of the message. `decode` reads this form by its first few
bytes and without protobuf. It reads every other form that protobuf allows with protobuf. This module must never
interpret the data, nor import anything of the daemon.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

import xxhash
from google.protobuf.message import DecodeError

from paramserver.v1 import parameter_store_pb2 as pb

# The most bytes of tensor data in one chunk, which is one message of a Read or Write stream.
MAX_CHUNK_BYTES = 1 << 20

_CHUNK_TAG = 0x12
_CHECKSUM_TAG = 0x09
_FIRST_BYTE_TAG = 0x10
_DATA_TAG = 0x1A
_CHECKSUM = struct.Struct("<BQ")
# The most bytes of a uint64 in a protobuf message, which encodes it as a varint: each byte holds seven of its 64 bits.
_MAX_VARINT_BYTES = 10

MessageT = TypeVar("MessageT", pb.ReadResponse, pb.WriteRequest, pb.AccessLoanRequest, pb.AccessLoanResponse)


class MalformedMessageError(ValueError):
    """The error for bytes that are not a message of the contract."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a source from `first_byte` on, as they arrived, with the checksum that the sender computed."""

    checksum: int
    first_byte: int
    data: memoryview

    @property
    def is_intact(self) -> bool:
        """Whether the data still has the checksum that was sent with it."""
        return self.checksum == checksum(self.first_byte, self.data)


def checksum(first_byte: int, data: memoryview | bytes) -> int:
    """Return XXH3-64 of the data with `first_byte` as its seed, so that good bytes at a wrong place do not match."""
    return xxhash.xxh3_64_intdigest(data, seed=first_byte)


def encode(first_byte: int, data: memoryview | bytes) -> bytes:
    """Return the message that carries a chunk. The data is copied once."""
    head = b"".join(
        (
            _CHECKSUM.pack(_CHECKSUM_TAG, checksum(first_byte, data)),
            bytes((_FIRST_BYTE_TAG,)),
            _varint(first_byte),
            bytes((_DATA_TAG,)),
            _varint(len(data)),
        )
    )
    return b"".join((bytes((_CHUNK_TAG,)), _varint(len(head) + len(data)), head, data))


def decode(message: bytes, kind: type[MessageT]) -> Chunk | MessageT:
    """Return the chunk that a message carries, or the parsed message if it carries something else.

    The data of the chunk is a view of the message's own memory.

    Raises:
        MalformedMessageError: the bytes are not a message of this kind.
    """
    if (chunk := _decode_chunk(message)) is not None:
        return chunk
    try:
        parsed = kind.FromString(message)
    except DecodeError as error:
        raise MalformedMessageError(f"{len(message)} bytes that are no {kind.DESCRIPTOR.name}") from error
    if parsed.WhichOneof("message") != "chunk":
        return parsed
    return Chunk(parsed.chunk.checksum, parsed.chunk.first_byte, memoryview(parsed.chunk.data))


def _decode_chunk(message: bytes) -> Chunk | None:
    """Return the chunk if the message has the form that `encode` writes.

    Return None for other bytes, which may still be a valid message.
    """
    try:
        if message[0] != _CHUNK_TAG:
            return None
        length, at = _read_varint(message, 1)
        tag, value = _CHECKSUM.unpack_from(message, at)
        if tag != _CHECKSUM_TAG or at + length != len(message) or message[at + _CHECKSUM.size] != _FIRST_BYTE_TAG:
            return None
        first_byte, at = _read_varint(message, at + _CHECKSUM.size + 1)
        if message[at] != _DATA_TAG:
            return None
        length, at = _read_varint(message, at + 1)
        if at + length != len(message):
            return None
    except (IndexError, struct.error):
        return None
    return Chunk(value, first_byte, memoryview(message)[at:])


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a varint's value and the index after its last byte.

    Raises:
        IndexError: the bytes from `at` on are not the varint of a uint64 by protobuf's rules.
    """
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, at
    raise IndexError
