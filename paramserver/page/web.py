"""The page as a document of its own: HTML with its style and its script inside, and the headers that confine it.

This module owns the document. The document has no figures, so that a browser may load it without a token; the script
asks for the figures with the token that the user enters. This module must never let the document load, send or run
anything but what is in the document, and its figures.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

# The HTTP headers of every answer of the page's server, which keep browsers from caching, framing and sharing it.
CONFINED = (
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)


@cache
def document() -> tuple[bytes, str]:
    """Return the HTML document, and the Content-Security-Policy under which it is shown.

    The policy names style and script by their hashes, so that no other ones run, and forbids the script to turn text
    into elements (Trusted Types), so that a name cannot become markup.
    """
    style, script = _asset("page.css"), _asset("page.js")
    html = _asset("page.html").replace("/* style */", style).replace("/* script */", script)
    policy = (
        "default-src 'none'",
        f"style-src '{_digest(style)}'",
        f"script-src '{_digest(script)}'",
        "connect-src 'self'",
        # The document contains its icon as a data: URL.
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return html.encode(), "; ".join(policy)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
