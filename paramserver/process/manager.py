"""What the daemon tells the service manager that started it. The protocol is that of systemd: man 3 sd_notify.

Must never fail a start or a stop: without a manager it does nothing, and it logs a manager that cannot be reached.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)

_VARIABLE = "NOTIFY_SOCKET"


def tell_manager(state: str) -> None:
    """Send a state, such as READY=1, to the socket that NOTIFY_SOCKET names; without that variable, nothing."""
    address = os.environ.get(_VARIABLE)
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            # A name that begins with @ is one of the kernel's, without a file.
            manager.connect("\0" + address[1:] if address.startswith("@") else address)
            manager.sendall(state.encode())
    except OSError as error:
        log.warning("%s=%s cannot be told %s: %s", _VARIABLE, address, state, error)
