"""The slots in the arena's header, by which a process that maps the arena learns that its session has ended.

A slot is two words of eight bytes. The daemon gives each session a slot with a new generation number, and writes the
number into the first word. When the session ends, the daemon writes another value (0), so the client knows that it must
not write to the arena any more.

The client holds an exclusive record lock on the word's first byte as long as it may write. The kernel releases the lock
when the process ends, also when it is killed, and never while the process is only stopped. The daemon reuses a slot
only when no process holds its lock.

A client that has registered the arena with the driver of its device writes the generation into the second word when the
device has done all copies, and only then releases the lock. If the process is killed, the second word does not have the
generation although the lock is gone: the device may still write to the arena. This module knows nothing of sessions or
clients.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from storage.base import syscalls

# The byte of the arena's header at which the slots of clients begin. Before them the header has the nonce, the mark and
# the settled word, whose places are in arena.py.
FIRST_SLOT_BYTE = 64
SLOT_BYTES = 16
_WORD_BYTES = 8
# The first word of a slot that is free or whose session has ended.
_ENDED = 0


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """A taken slot, whose first word is at byte `offset` of the arena.

    The word has the value `generation`, which no other slot ever had, until the slot is ended.
    """

    offset: int
    generation: int


class Slots:
    """Takes, ends and frees the slots of one arena for the sessions that map it."""

    def __init__(self, words: memoryview, fd: int, count: int) -> None:
        """Manage `count` slots in `words`, the header of the arena whose descriptor is `fd`."""
        self._words = words.cast("Q")
        self._fd = fd
        self._generations = itertools.count(1)
        # The free slots, oldest first. The slot that was freed first is given to the next client. If a client is
        # stopped after it got its slot and before it locks the slot, the slot is then unlikely to be given away again
        # meanwhile: the client finds the slot's word changed, instead of locking a word that now belongs to another
        # client.
        self._free = deque(range(FIRST_SLOT_BYTE, FIRST_SLOT_BYTE + count * SLOT_BYTES, SLOT_BYTES))

    def take(self) -> ArenaSlot | None:
        """Take a free slot and give it a new generation; None if all slots are taken."""
        if not self._free:
            return None
        slot = ArenaSlot(self._free.popleft(), next(self._generations))
        index = slot.offset // _WORD_BYTES
        self._words[index + 1] = 0
        self._words[index] = slot.generation
        return slot

    def end(self, slot: ArenaSlot) -> None:
        """Change the slot's first word, so that the client knows that its session has ended. The slot stays taken."""
        self._words[slot.offset // _WORD_BYTES] = _ENDED

    def is_held(self, slot: ArenaSlot) -> bool:
        """Return whether a client holds the lock of the slot, and so may still write to the arena."""
        return syscalls.is_locked_elsewhere(self._fd, slot.offset)

    def holder(self, slot: ArenaSlot) -> int | None:
        """Return the id of the process that holds the slot's lock; None if no process that is visible here does."""
        return syscalls.locker(self._fd, slot.offset)

    def has_left(self, slot: ArenaSlot) -> bool:
        """Return whether the client has written that its device has done all copies from and to the arena."""
        return self._words[slot.offset // _WORD_BYTES + 1] == slot.generation

    def free(self, slot: ArenaSlot) -> None:
        """Free an ended slot whose lock no process holds, so that it can be taken again."""
        self._free.append(slot.offset)

    def close(self) -> None:
        """Release the view of the arena's header, so that the arena can be unmapped."""
        self._words.release()
