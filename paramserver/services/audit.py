"""The record of the calls that destroy or stop something: each becomes a line of an audit log and an event.

This module owns nothing. It must never change what a call does, or what its caller gets.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from paramserver.events import EventKind, EventLog
from paramserver.process.audit_log import AuditLog
from paramserver.rpc.status import finished, status_code
from paramserver.security.gate import Context, RefusedError
from paramserver.security.principals import Principal, Role
from storage.base.errors import StorageError

ResultT = TypeVar("ResultT")

# The most characters of a call's argument, or of its result, in the audit record. Names fit, because the daemon refuses
# a call with a name of more than 1024 bytes.
MAX_TEXT = 1024


class Audit:
    """The object that records each call which destroys or stops something, in an audit log and as an event."""

    def __init__(self, of_operators: AuditLog, of_jobs: AuditLog, events: EventLog) -> None:
        """Make the audit.

        Args:
            of_operators: gets the calls with tokens of admins.
            of_jobs: gets all other calls, so that no holder of a token of jobs can push out the lines of operators with
                many calls.
            events: gets all calls.
        """
        self._of_operators = of_operators
        self._of_jobs = of_jobs
        self._events = events

    async def call(
        self,
        verb: str,
        request: Message,
        principal: Principal,
        context: Context,
        work: Coroutine[Any, Any, ResultT],
    ) -> ResultT:
        """Do the work of a call, record the call with its result, and return what the work returns.

        Work that has begun is finished and recorded even if the client goes. This raises what the work raises.
        """
        return await finished(self._call(verb, request, principal, context.peer(), work))

    async def _call(
        self, verb: str, request: Message, principal: Principal, peer: str, work: Coroutine[Any, Any, ResultT]
    ) -> ResultT:
        result = "OK"
        try:
            return await work
        except StorageError as error:
            result = f"{status_code(error).name}: {error}"
            raise
        except RefusedError as error:
            result = f"{error.code.name}: {error}"
            raise
        except BaseException as error:
            result = f"INTERNAL: {type(error).__name__}"
            raise
        finally:
            arguments = {
                key: value[:MAX_TEXT] if isinstance(value, str) else value
                for key, value in MessageToDict(request, preserving_proto_field_name=True).items()
            }
            entry = {
                "principal": principal.name,
                "peer": peer,
                "verb": verb,
                "arguments": arguments,
                "result": result[:MAX_TEXT],
            }
            self._events.add(EventKind.ADMIN, verb, f"{principal.name} from {peer}: {arguments}: {result[:MAX_TEXT]}")
            log = self._of_operators if principal.role is Role.ADMIN else self._of_jobs
            await log.note(entry)
