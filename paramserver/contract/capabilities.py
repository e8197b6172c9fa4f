"""The names of what a client and a store can do beyond the first version of the wire contract.

Each end names its capabilities when a session begins: the client in its Hello, the store in its Welcome. An end uses a
capability only if the other end has named it, and ignores names that it does not know. So an old trainer works with a
new daemon, and the reverse. docs/architecture.md says how a capability is added.
"""

from __future__ import annotations

# If a client with this capability requests a job's step without naming one, the store gives it the newest settled step.
# A store with this capability has the call SettleStep.
SETTLED_STEPS = "settled-steps"
# A store with this capability makes each numbered call of a session once. If the client repeats a call, the store sends
# the first call's answer again; see repeated_calls.py.
REPEATED_CALLS = "repeated-calls"
# A store with this capability has the call AmendStep.
AMENDED_STEPS = "amended-steps"
# A store with this capability lets a rank whose session has ended come back to its run with a new session. The store
# does not reuse the memory to which the rank was writing gradients until the rank's process cannot write there.
RETURNING_RANKS = "returning-ranks"
# A store with this capability accepts entries of a job that hold large buffers of the ranks. They are no part of the
# model; see buffer_names.py.
LARGE_BUFFERS = "large-buffers"
# A store with this capability encodes a slab as `KindSpec.codec` says, and refuses a codec that it does not know. Any
# other store does not see the field, and would keep the elements as they are.
CODECS = "codecs"

CAPABILITIES = (SETTLED_STEPS, REPEATED_CALLS, RETURNING_RANKS, AMENDED_STEPS, LARGE_BUFFERS, CODECS)
