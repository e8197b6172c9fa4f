"""The verb `paramserver-admin health`."""

from __future__ import annotations

from typing import Annotated

import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paramserver.admin.connection import Address, connected_channel
from paramserver.admin.nodes import only_one
from paramserver.v1 import parameter_store_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterStore"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING


def health(
    address: Address = None,
    timeout: Annotated[float, typer.Option(help="Longest wait for the answer, in seconds.", min=0.1)] = 5.0,
) -> None:
    """Say whether the daemon serves, for probes: exit status 0 if it does, else 1. This needs no token."""
    with connected_channel(only_one(address, "health")) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=_SERVICE), timeout=timeout)
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        typer.echo(status)
        if answer.status != _SERVING:
            raise typer.Exit(1)
