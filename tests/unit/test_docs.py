"""The links, files, tests, rooms and classes that the pages name exist, and the paragraphs of the pages are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_import_rules import rooms as rooms_of

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "proto", "paramserver", "storage", "trainer_client", "benchmarks", "examples", "tests")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
FILES = [path for folder in FOLDERS for ending in ("py", "proto") for path in (ROOT / folder).rglob(f"*.{ending}")]
ARCHITECTURE = ROOT / "docs/architecture.md"
GLOSSARY = ROOT / "docs/glossary.md"
# A paragraph with more words is easier to read as a list, or as two paragraphs.
MOST_WORDS = 90

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(page: Path) -> str:
    """Return the text of a page without code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return the text of a page without code blocks, and without the sections that a benchmark writes."""
    return re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", without_code(page), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the names under which GitHub finds the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_there(target: str, page: Path) -> bool:
    """Return whether a relative link of a page leads to a file, and to a heading of it if it names one."""
    name, _, anchor = target.partition("#")
    path = page.parent / name if name else page
    return path.exists() and (not anchor or anchor in anchors(path))


def paragraphs(text: str) -> Iterator[str]:
    """Yield each paragraph and each item of a list, without headings and tables."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.splitlines() if not line.lstrip().startswith(("|", "#"))]
        yield from re.split(r"\n(?=(?:[-*]|\d+\.) )", "\n".join(lines))


def rows(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the tables under a heading of a page."""
    after = page.read_text(encoding="utf-8").split(f"\n{heading}\n", maxsplit=1)[1]
    level = heading.index(" ")
    under = re.split(rf"^#{{1,{level}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in under.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))

    assert [link for link in links if "://" not in link and not is_there(link, page)] == []


@each_page
def test_every_file_and_test_that_a_page_names_is_there(page: Path) -> None:
    """A page may leave out the first folders of a file."""
    missing = []
    for name, test in re.findall(r"`([\w/.]+/\w+\.(?:py|proto))(?:::(\w+))?`", prose(page)):
        found = [path for path in FILES if f"/{path.relative_to(ROOT)}".endswith(f"/{name}")]
        if not any(not test or f"def {test}(" in path.read_text(encoding="utf-8") for path in found):
            missing.append(f"{name}::{test}")
    assert missing == []


@each_page
def test_paragraphs_are_short(page: Path) -> None:
    words = {paragraph[:60]: len(paragraph.split()) for paragraph in paragraphs(prose(page))}

    assert {beginning: count for beginning, count in words.items() if count > MOST_WORDS} == {}


@each_page
def test_sentences_name_their_actor(page: Path) -> None:
    """CONTRIBUTING.md has the rule, and quotes the words."""
    found = re.findall(r"\b(?:no|some|any|every)body\b|\bwhoever\b", prose(page), flags=re.IGNORECASE)

    assert page.name == "CONTRIBUTING.md" or found == []


@pytest.mark.parametrize("package", ["storage", "paramserver", "trainer_client"])
def test_the_architecture_has_a_row_for_every_room(package: str) -> None:
    (heading,) = re.findall(rf"^### `{package}`.*$", ARCHITECTURE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = [first.strip("`") for first, *_ in rows(ARCHITECTURE, heading) if first.startswith("`")]
    assert sorted(named) == sorted(room for room in rooms_of(package) if room != "__init__")


def test_the_names_of_a_shards_bytes_are_those_of_the_code() -> None:
    named = rows(ARCHITECTURE, "## The names of one shard's bytes")[2:]

    assert len(named) > 9
    for name, file, *_ in named:
        code = (ROOT / file.strip("`")).read_text(encoding="utf-8")
        assert re.search(rf"^(class|message) {name.strip('`').removeprefix('pb.')}\b", code, re.MULTILINE), name


def test_the_glossary_has_each_word_once_in_order() -> None:
    words = [first.strip("*") for first, *_ in rows(GLOSSARY, "## Words")[2:]]

    assert len(words) > 40
    assert words == sorted(set(words))
