"""The form of the files that hold one token each, for trainers, the admin tool and a daemon that borrows memory.

This module must never put what a file holds into a message, because a user may have given the path of a private key by
mistake.
"""

from __future__ import annotations


def token_in(content: bytes) -> str | None:
    """Return the token that a file with this content holds, or None if it holds anything else.

    A token is one word of printable ASCII. gRPC refuses a header with other characters, and its error names no file.
    """
    token = content.decode(errors="replace").strip()
    return token if token and token.isascii() and token.isprintable() and " " not in token else None
