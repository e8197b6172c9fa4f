"""The capabilities that a client and a daemon name in Hello and Welcome, so that each knows what the other can do.

A release that changes what a call means, or adds one that the other end needs, adds a name here. The other end then
acts as before, or refuses by name at the start of the session. This module owns the names, which never change.
"""

from __future__ import annotations

# A client with it gets the newest settled step if it names none. A daemon with it has the call SettleStep.
SETTLED_STEPS = "settled-steps"

CAPABILITIES = (SETTLED_STEPS,)
