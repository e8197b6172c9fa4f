"""A process that holds many idle Reads open, and one that reads slowly; it must not share the measured client's CPU.

Run it as `python -m benchmarks.dataplane.idle_streams ADDRESS SESSION_ID LEASE_ID COUNT`. It prints "ready" when all
streams are open, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys

import grpc.aio
import uvloop

from paramserver.contract.channel import NO_PROXY, target_of
from paramserver.v1 import parameter_store_pb2 as pb
from trainer_client.client.transport.channel import SERVICE_NAME

STREAMS_PER_CHANNEL = 100
SLOW_BYTES = 64 << 10
SLOW_PAUSE_SECONDS = 0.1


RawCall = grpc.aio.StreamStreamCall[bytes, bytes]


async def _open(channel: grpc.aio.Channel, session_id: str, lease_id: int, credit_bytes: int) -> RawCall:
    call: RawCall = channel.stream_stream(f"/{SERVICE_NAME}/Read")()
    opened = pb.ReadRequest.Open(session_id=session_id, lease_id=lease_id, credit_bytes=credit_bytes)
    await call.write(pb.ReadRequest(open=opened).SerializeToString())
    # The daemon sends the header, then a chunk as large as the credit.
    await call.read()
    await call.read()
    return call


async def _read_slowly(channel: grpc.aio.Channel, session_id: str, lease_id: int) -> None:
    """Read the lease slowly, again and again, until this task is cancelled."""
    while True:
        call = await _open(channel, session_id, lease_id, SLOW_BYTES)
        while True:
            await call.write(pb.ReadRequest(credit=pb.Credit(bytes=SLOW_BYTES)).SerializeToString())
            if await call.read() is grpc.aio.EOF:
                break
            await asyncio.sleep(SLOW_PAUSE_SECONDS)


def _channel(address: str) -> grpc.aio.Channel:
    """Return a channel with its own TCP connection, which gRPC would otherwise share between channels."""
    return grpc.aio.insecure_channel(target_of(address), options=[*NO_PROXY, ("grpc.use_local_subchannel_pool", 1)])


async def main(address: str, session_id: str, lease_id: int, count: int) -> None:
    """Open the streams, print "ready", and keep them open until standard input ends."""
    channels = [_channel(address) for _ in range(-(-count // STREAMS_PER_CHANNEL))]
    idle = [await _open(channels[i // STREAMS_PER_CHANNEL], session_id, lease_id, 1) for i in range(count)]
    slow = asyncio.ensure_future(_read_slowly(channels[0], session_id, lease_id))
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    slow.cancel()
    for call in idle:
        call.cancel()
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
