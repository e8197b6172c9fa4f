"""A daemon that lends memory and lies about it: `main` runs `paramserver serve` with a changed way to lend.

The file beside the configuration, with the suffix `.lies`, says how it lies at the moment:

- `forge`: words of what is read are changed, at random places;
- `replay`: what is read is what the address had before it was last written;
- `lie`: what is to be kept is acknowledged and forgotten, and a read returns the bytes of another address.

Without the file, or with an empty one, it is honest.
"""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

from paramserver import cli
from storage.tiers.lent import Loan

FORGED_WORDS = 5


class Liar:
    """The lies of one process."""

    def __init__(self, how: Path) -> None:
        self._how = how
        self._read = Loan.read
        self._keep = Loan.keep
        # The bytes that each span had before it was last written, and those that any span had, by their number.
        self._before: dict[tuple[int, int], bytes] = {}
        self._others: dict[int, bytes] = {}

    def keep(self, loan: Loan, first_byte: int, data: memoryview) -> bool:
        """Take the place of `Loan.keep`."""
        if self._lie == "lie" and random.random() < 0.5:
            return True
        if (old := self._read(loan, first_byte, len(data))) is not None:
            self._before[first_byte, len(data)] = bytes(old)
        self._others[len(data)] = bytes(data)
        return self._keep(loan, first_byte, data)

    def read(self, loan: Loan, first_byte: int, nbytes: int) -> memoryview | bytes | None:
        """Take the place of `Loan.read`."""
        data, lie = self._read(loan, first_byte, nbytes), self._lie
        if lie == "forge" and data is not None:
            forged = bytearray(data)
            for _ in range(FORGED_WORDS):
                struct.pack_into("<Q", forged, 8 * random.randrange(nbytes // 8), random.getrandbits(64))
            return bytes(forged)
        if lie == "replay":
            return self._before.get((first_byte, nbytes), data)
        return self._others.get(nbytes, bytes(nbytes)) if lie == "lie" else data

    @property
    def _lie(self) -> str:
        return self._how.read_text() if self._how.exists() else ""


def main() -> None:
    """Run the daemon that sys.argv asks for."""
    liar = Liar(lies_of(Path(sys.argv[sys.argv.index("--config") + 1])))

    def read(loan: Loan, first_byte: int, nbytes: int) -> memoryview | bytes | None:
        return liar.read(loan, first_byte, nbytes)

    def keep(loan: Loan, first_byte: int, data: memoryview) -> bool:
        return liar.keep(loan, first_byte, data)

    Loan.read, Loan.keep = read, keep  # type: ignore[assignment, method-assign]
    cli.main()


def lies_of(config: Path) -> Path:
    """Return the file that says how the daemon with this configuration lies."""
    return config.with_suffix(".lies")


if __name__ == "__main__":
    main()
