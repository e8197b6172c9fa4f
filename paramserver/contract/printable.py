"""The conversion of text from strangers into text that can be shown to a person.

Such text is a name that a client chose, or a message that quotes the name. Both ends print it, so both import this
module. Do not use it on text that a program reads, because JSON has escapes of its own.
"""

from __future__ import annotations


def printable(text: object) -> str:
    """Return the text with an escape sequence in place of each character that a terminal could interpret.

    These are all characters that `str.isprintable` refuses, for example control characters (line ends and terminal
    sequences), marks that reverse the direction of writing, and lone surrogates. So a name fills one line and shows
    what it contains: "a\\nb" becomes the four characters `a`, `\\`, `n` and `b`.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
