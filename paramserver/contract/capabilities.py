"""The names of what a client and a store can do beyond the first version of the wire contract.

Each end names its capabilities when a session begins: the client in its Hello, the store in its Welcome. An end uses a
capability only if the other end has named it, and ignores names that it does not know. So an old trainer works with a
new daemon, and the reverse. docs/architecture.md says how a capability is added.
"""

from __future__ import annotations

# A client with it gets the newest settled step if it names none. A store with it has the call SettleStep.
SETTLED_STEPS = "settled-steps"
# The store makes a numbered call of a session once, and answers its repetitions; see repeated_calls.py.
REPEATED_CALLS = "repeated-calls"
# The store has the call AmendStep.
AMENDED_STEPS = "amended-steps"
# The store lets a rank come back to its run in another session after its own has ended, and holds back each gradient
# that the rank was writing.
RETURNING_RANKS = "returning-ranks"
# The store knows entries of a job with the large buffers of ranks, which are no part of the model; see buffer_names.py.
LARGE_BUFFERS = "large-buffers"

CAPABILITIES = (SETTLED_STEPS, REPEATED_CALLS, RETURNING_RANKS, AMENDED_STEPS, LARGE_BUFFERS)
