"""Text that can be shown to a person although a stranger wrote it: the names that clients choose, and their quotes.

Both ends print such text, so both import this. Must never be used on what a program reads, because JSON has escapes of
its own.
"""

from __future__ import annotations


def printable(text: object) -> str:
    """Return the text with an escape sequence in place of each character that a terminal could act upon.

    Those are control characters (line ends and terminal sequences), marks that reverse the direction of writing, lone
    surrogates, and all others that `str.isprintable` refuses. Such a name fills one line and looks like what it is:
    "a\\nb" becomes the four characters `a`, `\\`, `n` and `b`.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
