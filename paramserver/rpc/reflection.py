"""gRPC reflection behind the gate: what can be called is told to those who may call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from grpc_reflection.v1alpha import reflection

from paramserver.rpc.status import answering_errors
from paramserver.security.gate import Gate


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # it has no annotations
    """Answers like the library's own."""

    def __init__(self, gate: Gate, services: Sequence[str]) -> None:
        super().__init__(services)
        self._gate = gate

    async def ServerReflectionInfo(
        self, request_iterator: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        async with answering_errors(context):
            self._gate.principal(context)
            async for response in super().ServerReflectionInfo(request_iterator, context):
                yield response
