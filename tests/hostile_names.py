"""Names that a client may choose to harm those who read them: in a table, in a log, in an error."""

from __future__ import annotations

# What the daemon takes as a name: it is printable, and no more than that.
ACCEPTED = {
    "markup that ends nothing": "[/nope]",
    "markup": "[bold red]x[/bold red]",
    "a link": "[link=https://example.com]x[/link]",
    "an escaped bracket": "\\[x]",
    "an emoji's code": ":smile:",
    "an emoji": "\N{GRINNING FACE}",
    "letters from right to left": "\N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}",
    "marks upon marks": "a" + "\N{COMBINING DIAERESIS}" * 50,
    "wide letters": "\N{CJK UNIFIED IDEOGRAPH-6A21}" * 60,
    "a thousand characters": "x" * 1000,
    "a format string": "%s%n{0}%(x)s",
    "an escape sequence, spelled out": "\\x1b[31m",
    "an option": "--yes",
    "a path": "../../etc/passwd",
}

# What the daemon refuses as a name, and what must do no harm where it is shown nevertheless.
REFUSED = {
    "a colour": "\x1b[31mred\x1b[0m",
    "a screen cleared": "\x1b[2J",
    "an 8-bit control": "\x9b31m",
    "a line end": "one\ntwo",
    "a carriage return": "one\rtwo",
    "a tab": "one\ttwo",
    "a line separator": "one\N{LINE SEPARATOR}two",
    "a right-to-left override": "abc\N{RIGHT-TO-LEFT OVERRIDE}def",
    "a zero-width space": "a\N{ZERO WIDTH SPACE}b",
    "a NUL": "a\x00b",
    "a delete": "a\x7fb",
    "a character of nobody": "\ue000",
    "more than 1024 bytes": "x" * 1025,
}

# A message cannot carry this one; a program's own strings can.
SURROGATE = "a\ud800b"

EVERY = ACCEPTED | REFUSED
