"""Sphinx's settings for the documentation site, which `make docs` builds from the pages as they are on disk.

The source directory is the root of the repository, so that the relative links of the pages are the same on disk, on a
code host and on the site. This module must never load anything from outside at view time: the theme brings its own
styles, and no page has a font or a script of another host.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paramserver import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
INDEX = "docs/index"

project = "paramserver"
release = version = __version__
author = "the authors of paramserver"
copyright = f"{datetime.now(UTC):%Y}, {author}; Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = INDEX
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "storage/FORMAT.md",
    "benchmarks/RESULTS.md",
]
exclude_patterns = [".venv", ".git", "build", "**/__pycache__"]

# Headings get the anchors that GitHub gives them, so that links work in both places.
myst_heading_anchors = 4
# The pages have fences without a language for drawings and outputs.
highlight_language = "text"
# Text between single backquotes in a docstring is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_display_short_literal_types = True
# A longer signature has a line for each parameter.
maximum_signature_line_length = 100
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "paramserver"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["extra"]
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _add_tables_of_contents(page: str) -> str:
    """Return the index with a hidden table of contents for each of its sections, which makes the site's menu."""
    trees = []
    for heading, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL):
        rows = re.findall(r"^\| \[([^]]*)\]\(([^)#]+\.md)\)", text, flags=re.MULTILINE)
        pages = "\n".join(f"{title} <{page_of_row}>" for title, page_of_row in rows)
        trees.append(f"```{{toctree}}\n:caption: {heading}\n:hidden:\n\n{pages}\n```")
    return page + "\n\n" + "\n\n".join(trees) + "\n"


def _unlink_directories(page: str, folder: Path) -> str:
    """Return the page without links to directories, of which a site has no view; their text stays."""

    def text_of(match: re.Match[str]) -> str:
        return match[1] if (folder / match[2]).is_dir() else match[0]

    return re.sub(r"\[([^]]*)\]\(([^)#:\s]+)\)", text_of, page)


def _prepare(_app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _unlink_directories(source[0], (ROOT / name).parent)
    if name == INDEX:
        source[0] = _add_tables_of_contents(source[0])


def _mark_examples(_app: Sphinx, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Mark the indented blocks of a docstring before its first section as code, which they are by our convention."""
    made: list[str] = []
    in_block = False
    for number, line in enumerate(lines):
        if re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line):
            made += lines[number:]
            break
        is_indented = line.startswith("    ")
        if is_indented and not in_block and made and not made[-1]:
            made += [".. code-block:: python", ""]
            in_block = True
        in_block = in_block and (is_indented or not line)
        made.append(line)
    lines[:] = made


def setup(app: Sphinx) -> None:
    """Have pages and docstrings prepared when they are read."""
    app.connect("source-read", _prepare)
    # Before napoleon, which makes fields of the sections.
    app.connect("autodoc-process-docstring", _mark_examples, priority=400)
