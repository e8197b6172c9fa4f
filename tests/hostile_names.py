"""Names that a hostile client may choose to harm readers of a table, a log or an error message."""

from __future__ import annotations

# The daemon accepts each of these names, because all of their characters are printable.
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

# The daemon refuses each of these names. A program that shows one of them nevertheless must do no harm.
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

# No protobuf message can carry this string, because it has no UTF-8 form. A string of a Python program can contain it.
SURROGATE = "a\ud800b"

EVERY = ACCEPTED | REFUSED
