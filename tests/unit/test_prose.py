"""Docstrings, comments and pages are plain English: they name the actor, and no comment completes the code before it.

The rules are words and forms that a machine can find. They are a floor: a sentence that passes can still be a riddle.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("storage", "paramserver", "trainer_client", "benchmarks", "deploy", "docs", "examples", "tests")
GENERATED = "paramserver/v1/"
# Pages in the root and in these folders.
PAGES = ("", *PACKAGES, "docs/tutorials", "proto")
# They list the words that they forbid.
RULES = ("tests/unit/test_prose.py", "CONTRIBUTING.md")

# Each pattern, and the better form.
WORDS = {
    r"nobody|somebody|anybody|everybody|whoever|whomever|no one|someone|anyone|everyone|those who": "name the actor",
    r"(?:is|are|was|were|be|been|being) told": "say who sends what to which object",
    r"how manieth": "write 'the number of ...'",
    r"(?:let|lets|letting) (?:all )?go": "write release, close, free or evict",
    r"in vain|for ever|had better|like all else|to be called": "write a plain sentence: 'Call this ...', 'until ...'",
}
_WORDS = {re.compile(rf"\b(?:{words})\b", re.IGNORECASE): remedy for words, remedy in WORDS.items()}
# Forms of sentences in docstrings and comments. The fields under `Args:` and the like may have them.
FORMS = {
    r"(?:^\s*|[.:!?)`]\s+)(?:Owns|Must|Knows|Holds)\b": "give it a subject: 'This module owns ...'",
    r"(?:^\s*|[.:!?)`]\s+)Raises\s": "write 'Raise X if ...', 'It can raise X.' or 'It raises what `f` raises.'",
    r"\bA\s+collective\b": "write 'All ranks must call this.'",
    r"(?:^\s*|[.;,]\s+)None:\s": "write 'None if ...', or say in a sentence what the caller then does",
}
_FORMS = {re.compile(form): remedy for form, remedy in FORMS.items()}
_FIELDS = re.compile(r"^( *)(?:Args|Attributes|Raises|Returns|Yields):\n(?:\1 .*\n|\s*\n)*", re.MULTILINE)
# A comment that begins so has no subject: it completes the identifier before it, or is no sentence.
_FRAGMENT = re.compile(r"(?:of|that|than|what|which|whose|whom|how)\b", re.IGNORECASE)
# A function's docstring begins with a verb. ruff's D401 finds wrong forms of verbs, and not these.
_NO_VERB = re.compile(
    r"(?:what|which|whether|how|where|when|who|whose|why|of|than|that|those|the|a|an|as|its?|one)\b", re.IGNORECASE
)
_NOUN_DECORATORS = {"property", "cached_property", "setter", "fixture"}
_PRAGMA = re.compile(r"(?:noqa|type:|fmt:|!)")


def test_prose_is_plain_english() -> None:
    found = [line for name in _files() for line in _findings(name)]
    assert not found, "reword these:\n" + "\n".join(found)


def _files() -> Iterator[str]:
    """Yield the paths of all sources and pages, relative to the root."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths += [path for folder in PAGES for path in (ROOT / folder).glob("*.md")]
    names = (path.relative_to(ROOT).as_posix() for path in sorted(paths))
    return (name for name in names if name not in RULES and not name.startswith(GENERATED))


def _findings(name: str) -> Iterator[str]:
    """Yield one line for each violation in a file: its place, the words and the remedy."""
    source = (ROOT / name).read_text()
    prose = _page(source) if name.endswith(".md") else [*_comments(source), *_docstrings(source)]
    for first_line, text, fault in prose:
        if fault:
            yield f"{name}:{first_line}: {fault}"
        yield from _matches(_WORDS, name, first_line, text)
        if not name.endswith(".md"):
            prose_alone = _FIELDS.sub(lambda fields: "\n" * fields[0].count("\n"), text)
            yield from _matches(_FORMS, name, first_line, prose_alone)


def _matches(patterns: Mapping[re.Pattern[str], str], name: str, first_line: int, text: str) -> Iterator[str]:
    """Yield one line for each match of a pattern in a text that begins at `first_line` of a file."""
    for pattern, remedy in patterns.items():
        for match in pattern.finditer(text):
            line = first_line + text.count("\n", 0, match.end())
            yield f"{name}:{line}: {match[0].strip()!r}: {remedy}"


def _page(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the text of a page as one piece, with blocks of code blanked out."""
    yield 1, re.sub(r"```.*?```", lambda match: "\n" * match[0].count("\n"), source, flags=re.DOTALL), ""


def _comments(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield each comment with its first line and its fault; consecutive lines without code are one comment."""
    blocks: list[tuple[int, int, list[str]]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = token.string.lstrip("# ")
        if token.type != tokenize.COMMENT or _PRAGMA.match(text):
            continue
        row, column = token.start
        continues = blocks and blocks[-1][0] + len(blocks[-1][2]) == row and blocks[-1][1] == column
        if continues and not token.line[:column].strip():
            blocks[-1][2].append(text)
        else:
            blocks.append((row, column, [text]))
    for row, _, lines in blocks:
        match = _FRAGMENT.match(lines[0])
        yield row, "\n".join(lines), f"a comment begins with {match[0]!r}: write a sentence" if match else ""


def _docstrings(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield each docstring with its first line and its fault."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            statement = node.body[0]
            if (text := ast.get_docstring(node, clean=False)) is not None:
                match = None if _may_begin_with_a_noun(node) else _NO_VERB.match(text)
                fault = f"a function's docstring begins with {match[0]!r}: begin with a verb" if match else ""
                yield statement.lineno, text, fault


def _may_begin_with_a_noun(node: ast.AST) -> bool:
    """Return whether a docstring belongs to a module, a class, a property, a fixture or a test."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    decorators = {name for d in node.decorator_list for name in re.findall(r"\w+", ast.unparse(d).partition("(")[0])}
    return node.name.startswith("test_") or bool(_NOUN_DECORATORS & decorators)
