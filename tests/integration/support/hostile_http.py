"""Clients that try to keep other ones from an HTTP endpoint, as a program: each opens a connection again when it ends.

`python -m tests.integration.support.hostile_http PORT COUNT [DIRECTORY]` has COUNT of them, of each kind in turn, until
its standard input ends. With the DIRECTORY of certificates they speak TLS. It prints a line once all are connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

HOST = "127.0.0.1"
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer guessed\r\n"
DRIP_SECONDS = 0.5
PAUSE_SECONDS = 0.01

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS context of a stranger, and that of a client whose certificate the daemon accepts."""
    stranger, known = (ssl.create_default_context(cafile=str(directory / "ca.pem")) for _ in range(2))
    known.load_cert_chain(directory / "client.pem", directory / "client-key.pem")
    return stranger, known


def half_a_hello() -> bytes:
    """Return the first half of what a TLS client says first."""
    out = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname=HOST)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    hello = out.read()
    return hello[: len(hello) // 2]


async def until_ended(reader: asyncio.StreamReader) -> None:
    """Wait until the daemon ends the connection."""
    await reader.read(-1)


async def silent(streams: Streams) -> None:
    await until_ended(streams[0])


async def half_a_handshake(streams: Streams) -> None:
    streams[1].write(half_a_hello())
    await until_ended(streams[0])


async def dripping(streams: Streams) -> None:
    for byte in REQUEST + b"X-Long: " + b"x" * 1000:
        streams[1].write(bytes([byte]))
        await streams[1].drain()
        await asyncio.sleep(DRIP_SECONDS)


async def guessing(streams: Streams) -> None:
    streams[1].write(REQUEST + b"\r\n")
    await until_ended(streams[0])


async def again_and_again(
    port: int, context: ssl.SSLContext | None, act: Callable[[Streams], Awaitable[None]], connected: asyncio.Semaphore
) -> None:
    name = None if context is None else HOST
    while True:
        with contextlib.suppress(OSError, EOFError):
            streams = await asyncio.open_connection(HOST, port, ssl=context, server_hostname=name)
            connected.release()
            try:
                await act(streams)
            finally:
                streams[1].transport.abort()
        # A client whose handshake is refused counts as well.
        connected.release()
        await asyncio.sleep(PAUSE_SECONDS)


async def main(port: int, count: int, directory: Path | None) -> None:
    stranger, known = (None, None) if directory is None else contexts(directory)
    kinds: list[tuple[ssl.SSLContext | None, Callable[[Streams], Awaitable[None]]]] = [
        (None, silent),
        (None, half_a_handshake),
        (known, dripping),
        (known, guessing),
        (stranger, silent),
    ]
    connected = asyncio.Semaphore(0)
    tasks = [
        asyncio.ensure_future(again_and_again(port, *kinds[number % len(kinds)], connected)) for number in range(count)
    ]
    for _ in range(count):
        await connected.acquire()
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))
