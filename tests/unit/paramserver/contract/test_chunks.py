"""The hand-written code reads and writes chunks exactly as protobuf does, and detects damage and malformed bytes."""

from __future__ import annotations

import random

import pytest
import xxhash
from google.protobuf.message import DecodeError

from paramserver.contract import chunks
from paramserver.v1 import parameter_store_pb2 as pb

PLACES = (0, 1, 127, 128, 300, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)
SIZES = (0, 1, 127, 128, 16_384, 1 << 20)


def sealed(first_byte: int, data: bytes) -> pb.Chunk:
    """Return the chunk as a client that uses only protobuf and xxhash would make it."""
    return pb.Chunk(checksum=xxhash.xxh3_64_intdigest(data, seed=first_byte), first_byte=first_byte, data=data)


def as_tuple(chunk: chunks.Chunk) -> tuple[int, int, bytes]:
    return chunk.checksum, chunk.first_byte, bytes(chunk.data)


@pytest.mark.parametrize("first_byte", PLACES)
@pytest.mark.parametrize("size", SIZES)
def test_protobuf_reads_what_is_written_and_the_other_way_round(first_byte: int, size: int) -> None:
    data = random.Random(size).randbytes(size)
    expected = sealed(first_byte, data)
    message = chunks.encode(first_byte, memoryview(data))
    assert pb.ReadResponse.FromString(message) == pb.ReadResponse(chunk=expected)
    assert pb.WriteRequest.FromString(message) == pb.WriteRequest(chunk=expected)
    for form in (message, pb.ReadResponse(chunk=expected).SerializeToString()):
        for decoded in (chunks.decode(form, pb.ReadResponse), chunks.decode(form, pb.WriteRequest)):
            assert isinstance(decoded, chunks.Chunk)
            assert as_tuple(decoded) == (expected.checksum, first_byte, data)
            assert decoded.is_intact


def test_fields_in_another_order_or_twice_mean_what_protobuf_says() -> None:
    data, place = b"\x1a\x02", b"\x10\x05"
    value = b"\x09" + (7).to_bytes(8, "little")
    for fields, expected in [
        (b"\x1a\x02" + data + value + place, (7, 5, data)),
        (value + place + b"\x10\x06" + b"\x1a\x02" + data, (7, 6, data)),
        (value + b"\x1a\x02" + data, (7, 0, data)),
        (place, (0, 5, b"")),
        (b"", (0, 0, b"")),
        # An unknown field follows the data.
        (value + place + b"\x1a\x02" + data + b"\x20\x01", (7, 5, data)),
    ]:
        decoded = chunks.decode(b"\x12" + bytes([len(fields)]) + fields, pb.WriteRequest)
        assert isinstance(decoded, chunks.Chunk)
        assert as_tuple(decoded) == expected


def test_other_messages_come_back_parsed() -> None:
    header = pb.WriteRequest(header=pb.WriteHeader(session_id="s", lease_id=3))
    assert chunks.decode(header.SerializeToString(), pb.WriteRequest) == header
    assert chunks.decode(b"", pb.ReadResponse) == pb.ReadResponse()


def test_every_mutation_is_what_protobuf_says_or_malformed() -> None:
    rng = random.Random(4)
    good = chunks.encode(1 << 20, rng.randbytes(40))
    for _ in range(20_000):
        message = bytearray(good[: rng.randint(0, len(good))] if rng.random() < 0.3 else good)
        for _ in range(rng.randint(0, 3)):
            if message:
                message[rng.randrange(min(24, len(message)))] = rng.randrange(256)
        try:
            expected = pb.ReadResponse.FromString(bytes(message))
        except DecodeError:
            with pytest.raises(chunks.MalformedMessageError):
                chunks.decode(bytes(message), pb.ReadResponse)
            continue
        decoded = chunks.decode(bytes(message), pb.ReadResponse)
        if isinstance(decoded, chunks.Chunk):
            assert as_tuple(decoded) == (expected.chunk.checksum, expected.chunk.first_byte, expected.chunk.data)
        else:
            assert decoded == expected


def test_damage_and_good_bytes_at_a_wrong_place_are_seen() -> None:
    data = bytes(range(100))
    message = bytearray(chunks.encode(64, data))
    for position in range(len(message) - len(data), len(message)):
        message[position] ^= 0x10
        decoded = chunks.decode(bytes(message), pb.ReadResponse)
        assert isinstance(decoded, chunks.Chunk) and not decoded.is_intact
        message[position] ^= 0x10
    assert chunks.Chunk(chunks.checksum(64, data), 64, memoryview(data)).is_intact
    assert not chunks.Chunk(chunks.checksum(64, data), 65, memoryview(data)).is_intact
