"""The client state that a commit carried, in the form that this version commits.

Earlier versions committed fewer entries. Only this module knows which entries they lack, so the code that resumes a run
finds the same entries whatever version made the commit. It must never change what a stored entry says.
"""

from __future__ import annotations

from typing import Any

from trainer_client.errors import ClientStateError
from trainer_client.run import client_state

# The entries that earlier versions did not commit, with the value that stands for "was not recorded".
_ENTRIES = ("model", "buffers", "made_at", "made_with", "imported", "rolled_back")


def decode_stored(encoded: bytes) -> dict[str, Any]:
    """Return the decoded client state of a commit; entries that its version did not record are None.

    The number of samples is an exception: all steps of such a run had the same global batch, so it can be computed.

    Args:
        encoded: the state that a trainer or an import committed.

    Raises:
        ClientStateError: no version of this library has made the text.
    """
    state = client_state.decode(encoded)
    try:
        counters = state["counters"]
        if "global_samples" not in counters:
            counters["global_samples"] = counters["global_steps"] * counters["train_batch_size"]
    except (KeyError, TypeError) as error:
        raise ClientStateError(f"the stored client state has no counters of a run: {error!r}") from error
    return dict.fromkeys(_ENTRIES) | state
