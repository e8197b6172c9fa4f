"""The extra states of a model's modules (torch's `get_extra_state`) in the commits of a run.

Quantizing layers keep scales and histories in their extra states, and a run that goes on without these computes other
values. This module owns the limit of their bytes in a commit. It must never end a run because of a state that cannot be
committed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

from trainer_client.errors import ClientStateError
from trainer_client.training.model.plain_state import modules_with_extra_state
from trainer_client.training.run import client_state

log = logging.getLogger(__name__)

# The most bytes of the encoded extra states of modules in one commit. The reason for a limit is the same as for
# buffers; see MAX_BUFFER_BYTES in plain_state.py.
MAX_EXTRA_BYTES = 256 << 10
_VALUE = "state"


class ExtraStates:
    """Collects the extra states of one model's modules for commits, and gives them back to the modules at a resume.

    Args:
        model: the model.
        is_loud: whether warnings name the states that are left out, once each.
    """

    def __init__(self, model: nn.Module, *, is_loud: bool) -> None:
        self._modules = modules_with_extra_state(model)
        self._is_loud = is_loud
        self._left_out: set[str] = set()

    def to_commit(self) -> dict[str, dict[str, str]]:
        """Return the encoded states by name, without those for which a commit has no room or no encoding."""
        found: dict[str, dict[str, str]] = {}
        room = MAX_EXTRA_BYTES
        for name, module in self._modules.items():
            try:
                encoded = client_state.encode_freely({_VALUE: module.get_extra_state()})
            except ClientStateError as error:
                self._leave_out(name, str(error))
                continue
            size = sum(map(len, encoded.values()))
            if size > room:
                self._leave_out(
                    name, f"it has {size} bytes, and a commit has room for {MAX_EXTRA_BYTES} of all of them"
                )
                continue
            found[name] = encoded
            room -= size
        return found

    def restore(self, stored: Mapping[str, Mapping[str, str]] | None) -> None:
        """Give the modules the extra states that a commit carried. Commits of earlier versions have none.

        Raises:
            ClientStateError: a stored state cannot be read.
        """
        for name, encoded in (stored or {}).items():
            if (module := self._modules.get(name)) is None:
                log.warning("the stored extra state %r is not in this model", name)
                continue
            module.set_extra_state(client_state.decode_freely(encoded)[_VALUE])

    def _leave_out(self, name: str, reason: str) -> None:
        if self._is_loud and name not in self._left_out:
            self._left_out.add(name)
            log.warning("commits do not have %s, so a run that goes on begins without it: %s", name, reason)
