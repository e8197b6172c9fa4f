"""The slots in the arena's header: how a process that maps the arena learns that its right to do so has ended.

A slot is an eight-byte word. It holds the generation of whoever has the slot, and something else once that right has
ended. The process that maps the arena keeps an exclusive record lock on the word's first byte as long as it may write:
the kernel takes the lock away when the process ends, however it ends, and never while it is merely stopped. A slot is
given to somebody else only when nobody holds that lock. Knows nothing of who the holders are.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from storage import syscalls

# After the nonce and the mark. Apart far enough for the word, near enough for thousands of them in some pages.
FIRST_SLOT_BYTE = 64
SLOT_BYTES = 16
_WORD_BYTES = 8
_NOBODY = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """The word at byte `offset` of the arena, which holds `generation` (never one that another slot had) until it is
    ended."""

    offset: int
    generation: int


class Slots:
    """`count` slots in the header `words` of the arena whose descriptor is `fd`."""

    def __init__(self, words: memoryview, fd: int, count: int) -> None:
        self._words = words.cast("Q")
        self._fd = fd
        self._generations = itertools.count(1)
        # The one that was given back first is given out first: a process that was stopped between being told of its
        # slot and locking it finds the word changed, not somebody else waiting for the lock.
        self._free = deque(range(FIRST_SLOT_BYTE, FIRST_SLOT_BYTE + count * SLOT_BYTES, SLOT_BYTES))

    def take(self) -> Slot | None:
        """A slot of a new generation; None where all are taken."""
        if not self._free:
            return None
        slot = Slot(self._free.popleft(), next(self._generations))
        self._words[slot.offset // _WORD_BYTES] = slot.generation
        return slot

    def end(self, slot: Slot) -> None:
        """Changes the word. The slot stays taken until it is given back."""
        self._words[slot.offset // _WORD_BYTES] = _NOBODY

    def is_held(self, slot: Slot) -> bool:
        """Whether a process that maps the arena may still write."""
        return syscalls.is_locked_elsewhere(self._fd, slot.offset)

    def give_back(self, slot: Slot) -> None:
        """Lets an ended slot, which nobody holds, be taken again."""
        self._free.append(slot.offset)

    def close(self) -> None:
        """Lets go of the memory."""
        self._words.release()
