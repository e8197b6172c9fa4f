"""The messages of the daemon to the service manager that started it. The protocol is systemd's: man 3 sd_notify.

This module must never fail a start or a stop: without a manager it does nothing, and if the manager cannot be reached,
it logs that.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)

_VARIABLE = "NOTIFY_SOCKET"


def tell_manager(state: str) -> None:
    """Send a state, such as READY=1, to the socket that NOTIFY_SOCKET names. Without that variable, do nothing."""
    address = os.environ.get(_VARIABLE)
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            # If the address of the service manager's socket begins with @, it is an abstract one (man 7 unix): the
            # socket has no file, and a zero byte replaces the @.
            manager.connect("\0" + address[1:] if address.startswith("@") else address)
            manager.sendall(state.encode())
    except OSError as error:
        log.warning("%s=%s cannot be told %s: %s", _VARIABLE, address, state, error)
