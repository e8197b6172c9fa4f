"""The verb `paramserver-admin reload`."""

from __future__ import annotations

from rich.text import Text

from paramserver.admin import printers
from paramserver.admin.connection import DEADLINE_SECONDS, Address, AsJson
from paramserver.admin.nodes import Question, run
from paramserver.v1 import store_admin_pb2 as admin_pb


def reload(address: Address = None, as_json: AsJson = False) -> None:
    """Have the daemon read its configuration again. Quotas and the memory that it lends take effect at once.

    Other changed keys need a restart, and the command names them.

    It refuses a configuration that cannot be used, or whose budgets are too small for the jobs that there are.

    The daemon follows its token file and its certificates by itself, without this verb.
    """
    question = Question(
        call=lambda store, _: store.Reload(admin_pb.ReloadRequest(), timeout=DEADLINE_SECONDS),
        show=_shown,
    )
    run(address, question, as_json=as_json)


def _shown(result: admin_pb.ReloadResponse) -> Text:
    parts = [f"changed: {', '.join(result.changed)}"] if result.changed else []
    parts += [f"a restart is needed for: {', '.join(result.restart_needed)}"] if result.restart_needed else []
    return printers.text("; ".join(parts) or "nothing has changed")
