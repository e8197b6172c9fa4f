"""A process that calls a daemon's health check every 10 ms, and records how long each answer takes.

It prints a line when it begins. When its standard input is closed, it prints a JSON list of [CLOCK_MONOTONIC at the
call, seconds until the answer].
"""

from __future__ import annotations

import json
import sys
import threading
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc

from trainer_client.transport.channel import open_channel
from trainer_client.transport.credentials import Credentials

PAUSE_SECONDS = 0.01


def main(address: str) -> None:
    """Call the health check until standard input ends, then print the samples."""
    over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    samples: list[tuple[float, float]] = []
    with open_channel(address, Credentials()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(service="paramserver.v1.ParameterStore"), timeout=60.0)
        print("begins", flush=True)
        while not over.wait(PAUSE_SECONDS):
            asked = time.monotonic()
            stub.Check(health_pb2.HealthCheckRequest(service="paramserver.v1.ParameterStore"), timeout=60.0)
            samples.append((asked, time.monotonic() - asked))
    print(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1])
